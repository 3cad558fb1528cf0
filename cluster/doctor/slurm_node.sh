# shellcheck shell=bash
# Prints the facts of a node in a Slurm job, a line `NAME=VALUE` each, then those of the probe. $1 the token and $2 $3 the
# folders of slurm_job.sh, $4 the run directory, $5 the runtime, $6 the image, $7 the Python program that prints versions,
# $8 the text of the probe.
token=$1 common_run_dir=$2 common_data_dir=$3 run_dir=$4 runtime=$5 image=$6 versions=$7 probe=$8

# The peer of the first node is the second one; the peer of every other node is the first one.
fact host "${SLURMD_NODENAME:-$(hostname)}"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
peer=${hosts[$((SLURM_NODEID == 0))]:-}
fact peer "$peer"

# The login node wrote the token into both folders. It reads the file that this node writes in return.
folder() {
    [ "$(cat "$2/.clusterctl-doctor.$token" 2>/dev/null)" = "$token" ] || return
    fact common "$1"
    echo "$token" 2>/dev/null > "$2/.clusterctl-doctor.$token.$SLURM_NODEID"
}
folder run_dir "$common_run_dir"
folder data_dir "$common_data_dir"

fact visible_gpus "${CUDA_VISIBLE_DEVICES:-}"
fact tmp "${TMPDIR:-/tmp}"
fact tmp_kb "$(df -Pk "${TMPDIR:-/tmp}" 2>/dev/null | { read -r _; read -r _ _ _ free _; echo "$free"; })"

# The runtime; `inside` is the command that enters the container.
inside=()
case $runtime in
apptainer)
    inside=(apptainer --silent exec --cleanenv --no-home --no-mount cwd "$image")
    fact apptainer "$(apptainer --version 2>/dev/null)"
    if ! [ -d "$image" ] && ! why=$(head -c 1 -- "$image" 2>&1 >/dev/null); then fact sif_unreadable "${why##*: }"
    elif command -v apptainer >/dev/null; then
        fact image_arch "$(apptainer sif list "$image" 2>/dev/null | sed -n 's:.*/\*System/\([a-z0-9]*\)).*:\1:p')"
        if why=$(timeout 60 "${inside[@]}" true 2>&1 < /dev/null); then fact sif_runs yes
        else fact sif_says "${why##*$'\n'}"; fi
    fi ;;
docker | podman) inside=("$runtime" run --rm --entrypoint "" "$image") ;;
pyxis) srun --help 2>/dev/null | grep -q -- --container-image && fact pyxis 'pyxis: srun has --container-image' ;;
esac
if [ "$SLURM_NODEID" = 0 ] && [ ${#inside[@]} -gt 0 ]; then
    timeout 60 "${inside[@]}" python3 -c "$versions" 2>/dev/null < /dev/null | sed 's/^/inside_/'
fi

if [ -n "$peer" ]; then set -- "$peer"; else set --; fi
exec bash -c "$probe" probe "$run_dir" "${runtime#apptainer}" "$image" "$versions" "$@"
