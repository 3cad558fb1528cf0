#!/bin/sh
# Remove the testbed: hosts, network, disks, keys. Safe to repeat. Keeps the container image of the hosts;
# `testbed/down.sh --image` removes it too.
set -eu

HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/settings.sh"

docker ps --all --quiet --filter label="$NAME" | xargs --no-run-if-empty docker rm --force --volumes >/dev/null
docker network ls --quiet --filter label="$NAME" | xargs --no-run-if-empty docker network rm >/dev/null
docker volume ls --quiet --filter label="$NAME" | xargs --no-run-if-empty docker volume rm >/dev/null
if [ "${1:-}" = --image ]; then
    docker image ls --quiet "${NODE_IMAGE%:*}" | xargs --no-run-if-empty docker image rm --force >/dev/null
fi
rm -rf "$STATE"
say "removed$([ "${1:-}" = --image ] || echo ", except the image ${NODE_IMAGE%:*} (make testbed-down ARGS=--image)")"
