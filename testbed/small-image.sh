#!/bin/sh
# Build a small container image with the layers of the trainer's, for tests that copy images. It cannot train.
# testbed/small-image.sh NAME [TEXT]: another TEXT changes one line of the last layer.
set -eu

HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/settings.sh"
[ $# -ge 1 ] || fail "name the image: testbed/small-image.sh trainer-small:0.1"
docker buildx build --quiet --load --tag "$1" --build-arg BASE_IMAGE="$(base_image)" --build-arg TEXT="${2:-}" \
    --file "$HERE/small.Dockerfile" "$HERE/.." >/dev/null
docker image inspect --format '{{.Id}}' "$1"
