# shellcheck shell=bash disable=SC2154
# What only the node itself knows: its number, and the GPUs that Slurm gave it.
export CLUSTER_NODE="node-$SLURM_NODEID" PET_NODE_RANK="$SLURM_NODEID"
where=$(hostname)
if [ "$device" = cuda ]; then
    IFS=, read -r -a gpus <<< "${CUDA_VISIBLE_DEVICES:-}"
    if [ "${#gpus[@]}" -lt "$PET_NPROC_PER_NODE" ]; then
        echo "error: $where: Slurm gave ${#gpus[@]} GPUs, and --gpus $PET_NPROC_PER_NODE asks for more" >&2
        exit 71
    fi
    # An engine is outside of the step's cgroup, in which these count from 0. Parts of a GPU (MIG) have names.
    case $CUDA_VISIBLE_DEVICES in
        *[!0-9,]*) export GIVEN_GPUS="$CUDA_VISIBLE_DEVICES" ;;
        *) export GIVEN_GPUS="${SLURM_STEP_GPUS:-$CUDA_VISIBLE_DEVICES}" ;;
    esac
fi
