#!/bin/sh
# Copy a container image from this machine's engine to all hosts: testbed/image.sh trainer:0.1. Skips hosts that have it.
#
# If the engine stores layers with overlay2 on the same file system as the testbed's volume, the hosts' engines share them
# as hard links. This takes seconds and no disk space, but restarts the hosts' engines, which ends their containers.
# Otherwise, and with `testbed/image.sh --load trainer:0.1`, each host gets the image by `docker save | docker load`:
# minutes and 6 GB per host.
set -eu

HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/settings.sh"
LOAD=
[ "${1:-}" != --load ] || { LOAD=yes; shift; }
[ $# = 1 ] || fail "name one image: testbed/image.sh trainer:0.1"
IMAGE=$1

id=$(docker image inspect --format '{{.Id}}' "$IMAGE" 2>/dev/null) || fail "this machine's engine has no image $IMAGE; make image"
layers=$(docker image inspect --format '{{join .RootFS.Layers " "}}' "$IMAGE")
engine=$(docker info --format '{{.DockerRootDir}}')
volume=$(docker volume inspect --format '{{.Mountpoint}}' "$NAME" 2>/dev/null) || fail "no host is running; type: make testbed"
on() { host=$1; shift; docker exec "$(container "$host")" "$@"; }
id_on() { on "$1" docker image inspect --format '{{.Id}}' "$IMAGE" 2>/dev/null || true; }
of_engine() { run_node --rm --volume "$engine:/engine" "$@"; }

shareable() {
    [ "$(docker info --format '{{.Driver}}')" = overlay2 ] && [ "${volume#"$engine"/}" != "$volume" ] &&
        of_engine --entrypoint test "$NODE_IMAGE" -e "/engine/image/overlay2/imagedb/content/sha256/${id#sha256:}"
}

send() {
    if [ -n "$LOAD" ]; then
        docker save "$IMAGE" | docker exec --interactive "$(container "$1")" docker load >/dev/null
    else
        on "$1" testbed-node stop-engine
        # shellcheck disable=SC2086
        of_engine "$NODE_IMAGE" share /engine "/engine/${volume#"$engine"/}/$1" "$id" $layers || true
        on "$1" testbed-node engine
        on "$1" docker tag "$id" "$IMAGE"
    fi
    on "$1" docker image prune --force --filter label=org.opencontainers.image.title=clusterctl-trainer >/dev/null
}

missing=
for host in $HOSTS; do
    [ "$(state_of "$host")" = running ] || fail "$host is not running; type: make testbed"
    [ "$(id_on "$host")" = "$id" ] || missing="$missing $host"
done
[ -n "$missing" ] || { say "$IMAGE is on $HOSTS"; exit 0; }

started=$(date +%s)
if [ -z "$LOAD" ] && ! shareable; then LOAD=yes; fi
[ -z "$LOAD" ] || say "loading $IMAGE on$missing (minutes, if it is large)"
for host in $missing; do send "$host" & done
wait
for host in $missing; do [ "$(id_on "$host")" = "$id" ] || fail "$host: its engine did not get $IMAGE"; done
say "$IMAGE is on$missing after $(($(date +%s) - started)) s"
