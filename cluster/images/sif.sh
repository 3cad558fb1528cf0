# shellcheck shell=bash
# sif.sh TARGET ENVIRONMENT RUNSCRIPT
# Builds a SIF file from the files of a container image; the input is their tar. ENVIRONMENT is the script that sets the
# image's variables, RUNSCRIPT the one that runs its entry point. Apptainer's messages go to stderr. The temporary folder is
# next to the target.
set -e -o pipefail
command -v apptainer >/dev/null || { echo "apptainer is not installed" >&2; exit 3; }
mkdir -p -- "$(dirname -- "$1")"
work=$(mktemp -d -- "$1.XXXXXX")
trap 'chmod -R u+rwX -- "$work"; rm -rf -- "$work"' EXIT
mkdir "$work/root"
tar -x --no-same-owner --no-same-permissions --exclude='dev/*' -C "$work/root"
chmod -R u+rwX -- "$work/root"
mkdir -p "$work/root/.singularity.d/env"
printf '%s' "$2" > "$work/root/.singularity.d/env/10-docker.sh"
printf '%s' "$3" > "$work/root/.singularity.d/runscript"
chmod 755 "$work/root/.singularity.d/env/10-docker.sh" "$work/root/.singularity.d/runscript"
options=()
# Not `| grep -q`, which closes the pipe at the first match: mksquashfs would sometimes fail.
case $(mksquashfs -help 2>&1) in
    *zstd*) options=(--mksquashfs-args "-comp zstd -Xcompression-level 3") ;;
esac
# A build from the engine's archive takes three times as long, because Apptainer compresses every layer with gzip first.
APPTAINER_TMPDIR="$work" APPTAINER_CACHEDIR="$work/cache" \
    apptainer --silent build "${options[@]}" "$work/image.sif" "$work/root" >&2
mv -f -- "$work/image.sif" "$1"
