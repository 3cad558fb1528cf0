#!/bin/sh
# Builds a small image of the same make as the trainer's (base, a layer of files, our code last) for tests that send images
# about: testbed/small-image.sh NAME [TEXT]. Another TEXT changes one line of its last layer. It cannot train.
set -eu

HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/settings.sh"
[ $# -ge 1 ] || fail "name the image: testbed/small-image.sh trainer-small:0.1"
docker buildx build --quiet --load --tag "$1" --build-arg BASE_IMAGE="$(base_image)" --build-arg TEXT="${2:-}" \
    --file "$HERE/small.Dockerfile" "$HERE/.." >/dev/null
docker image inspect --format '{{.Id}}' "$1"
