#!/bin/sh
# Gives every host's engine an image that this machine's engine has: testbed/image.sh trainer:0.1. Hosts that have it
# already are left alone; the engines of the others are started anew, which ends what runs on them.
#
# The image is loaded once, into an engine's folder that serves as the seed; the hosts' engines then share its layers as
# hard links: seconds, and no room on the disk. (`docker save | ssh n1 docker load` takes minutes, and 6 GB per host.)
set -eu

HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/settings.sh"
IMAGE=$1

id=$(docker image inspect --format '{{.Id}}' "$IMAGE" 2>/dev/null) || fail "this machine's engine has no image $IMAGE; make image"
id_on() { docker exec "$(container "$1")" docker image inspect --format '{{.Id}}' "$IMAGE" 2>/dev/null || true; }

lacking=
for host in $HOSTS; do
    [ "$(state_of "$host")" = running ] || fail "$host is not up; make testbed"
    [ "$(id_on "$host")" = "$id" ] || lacking="$lacking $host"
done
[ -n "$lacking" ] || { say "$IMAGE is on $HOSTS"; exit 0; }

started=$(date +%s)
if ! run_node --rm --entrypoint test $NODE_IMAGE -e "/disks/seed/image/overlay2/imagedb/content/sha256/${id#sha256:}"; then
    say "loading $IMAGE once for all hosts (a minute or two)"
    docker save "$IMAGE" | run_node --rm --interactive $NODE_IMAGE load
fi
give() {
    docker exec "$(container "$1")" testbed-node stop-engine
    run_node --rm $NODE_IMAGE seed "$1"
    docker exec "$(container "$1")" testbed-node engine
    docker exec "$(container "$1")" docker tag "$id" "$IMAGE"
    docker exec "$(container "$1")" docker image prune --force --filter label=org.opencontainers.image.title=clusterctl-trainer >/dev/null
}
for host in $lacking; do give "$host" & done
wait
for host in $lacking; do [ "$(id_on "$host")" = "$id" ] || fail "$host: its engine did not get $IMAGE"; done
say "$IMAGE is on$lacking after $(($(date +%s) - started)) s"
