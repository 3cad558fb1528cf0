#!/bin/sh
# Gives every host's engine an image that this machine's engine has: testbed/image.sh trainer:0.1. Hosts that have it
# already are left alone.
#
# An engine that keeps layers as folders on one file system with the testbed's volume (overlay2, the usual way) shares them
# with the hosts' engines as hard links: a few seconds, and no room on the disk. The hosts' engines are restarted for that,
# which ends what runs on them. Any other engine, and `testbed/image.sh --load trainer:0.1`, sends the image to each host
# as `docker save | docker load` would: minutes, and 6 GB, a host.
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
volume=$(docker volume inspect --format '{{.Mountpoint}}' "$NAME" 2>/dev/null) || fail "no host is up; make testbed"
on() { host=$1; shift; docker exec "$(container "$host")" "$@"; }
id_on() { on "$1" docker image inspect --format '{{.Id}}' "$IMAGE" 2>/dev/null || true; }
of_engine() { run_node --rm --volume "$engine:/engine" "$@"; }

shareable() {
    [ "$(docker info --format '{{.Driver}}')" = overlay2 ] && [ "${volume#"$engine"/}" != "$volume" ] &&
        of_engine --entrypoint test "$NODE_IMAGE" -e "/engine/image/overlay2/imagedb/content/sha256/${id#sha256:}"
}

give() {
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

lacking=
for host in $HOSTS; do
    [ "$(state_of "$host")" = running ] || fail "$host is not up; make testbed"
    [ "$(id_on "$host")" = "$id" ] || lacking="$lacking $host"
done
[ -n "$lacking" ] || { say "$IMAGE is on $HOSTS"; exit 0; }

started=$(date +%s)
if [ -z "$LOAD" ] && ! shareable; then LOAD=yes; fi
[ -z "$LOAD" ] || say "loading $IMAGE on$lacking (minutes, if it is large)"
for host in $lacking; do give "$host" & done
wait
for host in $lacking; do [ "$(id_on "$host")" = "$id" ] || fail "$host: its engine did not get $IMAGE"; done
say "$IMAGE is on$lacking after $(($(date +%s) - started)) s"
