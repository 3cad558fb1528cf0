# shellcheck shell=bash
# Makes a SIF file of the files of a container image, which are the input, as one tar. $1 the target, $2 the script that
# sets the image's variables, $3 the script that runs its entry point. Prints nothing; Apptainer's messages go to stderr. An
# unfinished file is in a folder beside the target, which is removed in any case.
set -e -o pipefail
command -v apptainer >/dev/null || { echo "there is no apptainer" >&2; exit 3; }
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
# No pipe to grep -q, which ends at the first match: the closed pipe would make mksquashfs fail now and then.
case $(mksquashfs -help 2>&1) in
    *zstd*) options=(--mksquashfs-args "-comp zstd -Xcompression-level 3") ;;
esac
# Apptainer can also build from the engine's own archive. It would pack every layer with gzip first, which takes three times
# as long.
APPTAINER_TMPDIR="$work" APPTAINER_CACHEDIR="$work/cache" \
    apptainer --silent build "${options[@]}" "$work/image.sif" "$work/root" >&2
mv -f -- "$work/image.sif" "$1"
