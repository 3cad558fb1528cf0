# shellcheck shell=bash disable=SC2154
# Builds the SIF file `target` from the files of a container image; the input is their tar, of about `size` bytes.
# `environment` is the script that sets the image's variables, `runscript` the one that runs its entry point. Apptainer's
# messages go to stderr. The temporary folder is next to the target.
set -e -o pipefail
# The files, Apptainer's copy of them, and the SIF file, which is about half as large.
need=$((size * 5 / 2))
folder=$(dirname -- "$target")
while [ ! -d "$folder" ]; do folder=$(dirname -- "$folder"); done
free=$(($(df -kP -- "$folder" | awk 'NR == 2 { print $4 }') * 1024))
[ "$free" -ge "$need" ] || {
    echo "$folder has $((free / 1000000000)) GB free, and the build needs about $((need / 1000000000)) GB" >&2
    exit 3
}
command -v apptainer >/dev/null || { echo "apptainer is not installed" >&2; exit 3; }
mkdir -p -- "$(dirname -- "$target")"
work=$(mktemp -d -- "$target.XXXXXX")
trap 'chmod -R u+rwX -- "$work"; rm -rf -- "$work"' EXIT
mkdir "$work/root"
tar -x --no-same-owner --no-same-permissions --exclude='dev/*' -C "$work/root"
chmod -R u+rwX -- "$work/root"
mkdir -p "$work/root/.singularity.d/env"
printf '%s' "$environment" > "$work/root/.singularity.d/env/10-docker.sh"
printf '%s' "$runscript" > "$work/root/.singularity.d/runscript"
chmod 755 "$work/root/.singularity.d/env/10-docker.sh" "$work/root/.singularity.d/runscript"
options=()
# Not `| grep -q`, which closes the pipe at the first match: mksquashfs would sometimes fail.
case $(mksquashfs -help 2>&1) in
    *zstd*) options=(--mksquashfs-args "-comp zstd -Xcompression-level 3") ;;
esac
# A build from the engine's archive takes three times as long, because Apptainer compresses every layer with gzip first.
APPTAINER_TMPDIR="$work" APPTAINER_CACHEDIR="$work/cache" \
    apptainer --silent build "${options[@]}" "$work/image.sif" "$work/root" >&2
mv -f -- "$work/image.sif" "$target"
