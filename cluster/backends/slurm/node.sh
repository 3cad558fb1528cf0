# shellcheck shell=bash disable=SC2154
# Sets the node's number and the GPUs that Slurm assigned. node.sh follows.
export CLUSTER_NODE="node-$SLURM_NODEID" PET_NODE_RANK="$SLURM_NODEID"
where=$(hostname)
if [ "$device" = cuda ]; then
    IFS=, read -r -a gpus <<< "${CUDA_VISIBLE_DEVICES:-}"
    if [ "${#gpus[@]}" -lt "$PET_NPROC_PER_NODE" ]; then
        echo "error: $where: Slurm gave ${#gpus[@]} GPUs, and --gpus $PET_NPROC_PER_NODE asks for more" >&2
        exit 71
    fi
    # Ids count from 0 in the step's cgroup, but the engine is outside of it. MIG devices have names.
    case $CUDA_VISIBLE_DEVICES in
        *[!0-9,]*) export GIVEN_GPUS="$CUDA_VISIBLE_DEVICES" ;;
        *) export GIVEN_GPUS="${SLURM_STEP_GPUS:-$CUDA_VISIBLE_DEVICES}" ;;
    esac
fi
