#!/bin/sh
# Build Kubernetes from Debian 12's source package, once per machine, and print the folder of the programs.
#
# The build runs in a container, which is removed with the compiler, the source and Go's cache. Nothing is installed on
# this machine. It takes 8 CPU minutes.
set -eu

KUBERNETES=$(cd "$(dirname "$0")" && pwd)
. "$KUBERNETES/settings.sh"

if [ ! -e "$BINARIES" ]; then
    "$HERE/../packaging/engine.sh" --check >/dev/null || fail "no Docker Engine; to install one: make engine"
    base=$(base_image)
    mkdir -p "$(dirname "$BINARIES")"
    new=$(mktemp -d "$BINARIES.XXXXXX")
    worker=$NAME-build-$$
    trap 'docker rm --force "$worker" >/dev/null 2>&1 || true; rm -rf "$new"' EXIT
    trap 'exit 130' INT TERM
    started=$(date +%s)
    say "building Kubernetes $VERSION on $base (10 minutes on 2 idle cores); its log is $BINARIES.log" >&2
    # In the background, so that a signal ends the wait.
    docker run --rm --init --name "$worker" --volume "$KUBERNETES:/from:ro" --volume "$new:/out" \
        --volume "$HERE/../packaging/debian-mirror.sh:/usr/local/bin/debian-mirror:ro" \
        "$base" bash /from/compile.sh "$VERSION" "$(id -u):$(id -g)" >"$BINARIES.log" 2>&1 &
    if ! wait $!; then
        tail -n 30 "$BINARIES.log" >&2
        fail "the build of Kubernetes failed; its log is $BINARIES.log"
    fi
    chmod 755 "$new"
    mv -T "$new" "$BINARIES" 2>/dev/null || [ -e "$BINARIES" ] || fail "cannot create $BINARIES"
    rm -f "$BINARIES.log"
    say "built Kubernetes $VERSION after $(($(date +%s) - started)) s: $BINARIES, $(du -sh "$BINARIES" | cut -f 1)" >&2
fi
echo "$BINARIES"
