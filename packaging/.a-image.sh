#!/bin/sh
# Build the container image of all nodes: packaging/image.sh trainer:0.1
set -eu

NAME=$1
HERE=$(dirname "$0")

if ! "$HERE/engine.sh" --check >/dev/null; then
    echo "image: no Docker Engine; to install one: make engine" >&2
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

echo "image: building $NAME on $base (a few minutes at first, seconds later)"
# The last commit that changed the content of the image, so that other commits leave the image and its ID as they are.
label=org.opencontainers.image
set -- "$@" --label "$label.version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)"
content=$(sed -n 's/^!//p' .dockerignore)
# shellcheck disable=SC2086  # several paths
if revision=$(git log -1 --format='%H %cI' -- Dockerfile $content 2>/dev/null) && [ -n "$revision" ]; then
    [ -z "$(git status --porcelain -- Dockerfile $content)" ] || changed=-dirty
    set -- "$@" --label "$label.revision=${revision% *}${changed:-}" --label "$label.created=${revision#* }"
fi
set -- --load --build-arg BASE_IMAGE="$base" "$@" --tag "$NAME" .
if [ -t 2 ]; then
    docker buildx build "$@"
elif ! docker buildx build --progress plain "$@" >/tmp/a-image.log 2>&1; then
    tail -n 30 "$secrets/log" >&2
    echo "image: the build of $NAME failed" >&2
    exit 1
fi
# older builds, unless a container uses them
docker image prune --force --filter label=org.opencontainers.image.title=clusterctl-trainer >/dev/null
docker image inspect --format '{{.Size}} {{.Id}}' "$NAME" | awk -v name="$NAME" '{printf "image: %s, %.1f GB, %s\n", name, $1 / 1e9, $2}'
