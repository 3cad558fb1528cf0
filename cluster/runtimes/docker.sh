# shellcheck shell=bash disable=SC2034,SC2154
# The functions of docker and podman.
image_id() { "$runtime" image inspect --format '{{.Id}}' "$CLUSTER_IMAGE"; }
prepare() {
    local rootless='' rights gpu gpus name
    # Not in the plan: one script runs on all nodes of a Slurm job.
    local named=(--name "$CLUSTER_JOB_ID-$CLUSTER_NODE")
    # Labels, because the engine's other users see this container, too.
    named+=(--label "CLUSTER_LAUNCH_ID=$CLUSTER_LAUNCH_ID" --label "CLUSTER_BACKEND=$CLUSTER_BACKEND")
    named+=(--label "CLUSTER_UID=$(id -u)")
    options=("${named[@]}" --user "$(id -u):$(id -g)")
    if [ "$runtime" = podman ]; then
        [ "$(id -u)" = 0 ] || { rootless=yes; options+=(--userns keep-id); }
    else # In a rootless engine, root is the caller on the host.
        case $(docker info --format '{{.SecurityOptions}}' 2>/dev/null) in
            *rootless*) rootless=yes options=("${named[@]}" --user 0:0) ;;
        esac
    fi
    # RDMA and NCCL need locked memory. Raising the limit needs CAP_SYS_RESOURCE (bit 24).
    [ ! -d /dev/infiniband ] || options+=(--device /dev/infiniband)
    rights=$(sed -n 's/^CapBnd:[[:space:]]*//p' /proc/self/status)
    if [ -z "$rootless" ] && [ $((0x${rights:-0} >> 24 & 1)) = 1 ]; then
        options+=(--ulimit memlock=-1 --ulimit stack=67108864)
    fi
    for name in "${site[@]}"; do options+=(--env "$name"); done
    # The GPUs that Slurm assigned: a container numbers them from 0.
    if [ -n "${GIVEN_GPUS:-}" ]; then
        IFS=, read -r -a gpus <<< "$GIVEN_GPUS"
        if [ "$runtime" = docker ]; then options+=(--gpus "\"device=$GIVEN_GPUS\"")
        else for gpu in "${gpus[@]}"; do options+=(--device "nvidia.com/gpu=$gpu"); done; fi
        export CUDA_VISIBLE_DEVICES
        CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((${#gpus[@]} - 1)))
    fi
    # The agent in the container stops the ranks if this file no longer changes.
    echo 0 > "$out/$CLUSTER_NODE.alive"
    (
        trap '' TERM INT USR2
        count=0
        while sleep 2 && kill -0 "$$" 2>/dev/null; do echo $((count += 1)) > "$out/$CLUSTER_NODE.alive"; done
    ) > /dev/null 2>&1 &
    alive=$!
}

