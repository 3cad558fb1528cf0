#!/bin/sh
# Builds the image that every node runs: packaging/image.sh trainer:0.1
set -eu

NAME=$1
HERE=$(dirname "$0")

if ! "$HERE/engine.sh" --check >/dev/null; then
    echo "image: this needs a Docker Engine; to set one up: make engine" >&2
    exit 1
fi
base=$("$HERE/base-image.sh")

secrets=$(mktemp -d)
trap 'rm -rf "$secrets"' EXIT
python=.venv/bin/python
[ -x $python ] || python=python3
$python "$HERE/pip-settings.py" "$secrets"
set --
for secret in pip.conf ca.crt; do
    [ ! -s "$secrets/$secret" ] || set -- "$@" --secret "id=$secret,src=$secrets/$secret"
done

before=$(docker image inspect --format '{{.Id}}' "$NAME" 2>/dev/null || true)
echo "image: building $NAME on $base (a few minutes at first, seconds later)"
docker buildx build --load --progress plain --build-arg BASE_IMAGE="$base" "$@" --tag "$NAME" . >"$secrets/log" 2>&1 || {
    tail -n 30 "$secrets/log" >&2
    echo "image: the build of $NAME failed" >&2
    exit 1
}
after=$(docker image inspect --format '{{.Id}}' "$NAME")
# the one it replaces, unless a container still uses it
[ -z "$before" ] || [ "$before" = "$after" ] || docker image rm "$before" >/dev/null 2>&1 || true
echo "image: $NAME, $after, $(docker image inspect --format '{{.Size}}' "$NAME" | awk '{printf "%.1f GB", $1 / 1e9}')"
