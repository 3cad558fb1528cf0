# shellcheck shell=sh disable=SC2034
# Settings of the testbed's scripts, which source this file with HERE set to this folder. A second testbed needs another
# name, network and state folder.
NAME=${TESTBED_NAME:-clusterctl-testbed}    # of the network and the volume, and the label of everything
HOSTS=${TESTBED_HOSTS:-n0 n1 n2}
NET=${TESTBED_NET:-172.30.0}
STATE=${TESTBED_STATE:-$HERE/.state}
# The tag is a hash of the sources, so that different checkouts have different container images.
NODE_IMAGE=clusterctl-testbed-node:$(cd "$HERE" && cat Dockerfile node.sh docker/* slurm/* | sha256sum | cut -c 1-12)
address() { echo "$NET.1${1#n}"; }
container() { echo "$NAME-$1"; }

say() { echo "testbed: $*"; }
fail() { echo "testbed: $*" >&2; exit 1; }

# Print the base image. If the node image exists, this needs no registry.
base_image() {
    if base=$(docker image inspect --format '{{index .Config.Labels "testbed.base"}}' "$NODE_IMAGE" 2>/dev/null); then
        echo "$base"
    else
        BASE_IMAGE=${TESTBED_BASE_IMAGE:-} "$HERE/../packaging/base-image.sh"
    fi
}

# Print running, paused or exited; nothing without such a container.
state_of() { docker ps --all --filter "name=^/$(container "$1")\$" --format '{{.State}}'; }

# `docker run` with all privileges except those that this machine may not have; --privileged needs them all.
run_node() {
    if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
        set -- --cgroupns private "$@"
    else
        set -- --cgroupns host --volume /sys/fs/cgroup:/sys/fs/cgroup:rw "$@"
    fi
    docker run --label "$NAME" --volume "$NAME:/disks" --cap-add ALL --cap-drop SYS_RESOURCE --security-opt seccomp=unconfined \
        --security-opt apparmor=unconfined --security-opt systempaths=unconfined --device /dev/fuse --tmpfs /run \
        --tmpfs /data:size=300m,mode=1777 --shm-size 1g "$@"
}

UP_TIMEOUT_S=120
wait_until_up() {
    until=$(($(date +%s) + UP_TIMEOUT_S))
    until docker exec "$(container "$1")" testbed-node answers >/dev/null 2>&1; do
        [ "$(date +%s)" -lt "$until" ] || fail "$1 is not up after $UP_TIMEOUT_S s; see: docker logs $(container "$1")"
        sleep 0.2
    done
}
