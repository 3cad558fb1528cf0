# shellcheck shell=bash disable=SC2154
# Sets the node's number and the GPUs that the batch system assigned. Above it, the batch system's node.sh sets `scheduler`
# (its name), `rank` and `host_gpus` (the ids of the GPUs on the host, if they differ in the job). agent/node.sh follows.
export CLUSTER_NODE="node-$rank" PET_NODE_RANK="$rank"
where=$(hostname)
if [ "$device" = cuda ]; then
    IFS=, read -r -a gpus <<< "${CUDA_VISIBLE_DEVICES:-}"
    if [ "${#gpus[@]}" -lt "$PET_NPROC_PER_NODE" ]; then
        echo "error: $where: $scheduler gave ${#gpus[@]} GPUs, and --gpus $PET_NPROC_PER_NODE asks for more" >&2
        exit 71
    fi
    # Ids may count from 0 in the job's cgroup, but the engine is outside of it. MIG devices have names.
    case $CUDA_VISIBLE_DEVICES in
        *[!0-9,]*) export GIVEN_GPUS="$CUDA_VISIBLE_DEVICES" ;;
        *) export GIVEN_GPUS="${host_gpus:-$CUDA_VISIBLE_DEVICES}" ;;
    esac
fi
