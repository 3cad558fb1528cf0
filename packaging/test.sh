#!/bin/sh
# Runs the tests: those that need nothing, then an engine, the image and the tests that need both, then three hosts (the
# testbed) and the tests that need them. Nothing is left out unsaid; in CI (CI=true) an engine that cannot be had is a
# failure.
#
#   packaging/test.sh IMAGE [engine-only | real-only]    ENGINE=no leaves the tests out that need an engine, and names them
set -eu

IMAGE=$1
HERE=$(dirname "$0")
ONLY=${2:-}
PYTEST=".venv/bin/python -m pytest"

name_tests_not_run() {
    echo
    echo "NOT RUN, $1. These tests need a Docker Engine:"
    $PYTEST -m "engine or real" --collect-only -q | sed -n 's/^\(.*::.*\)/  \1/p'
}

# The tests start an sshd of their own on loopback addresses; all they need is the program.
if ! PATH=$PATH:/usr/sbin command -v sshd >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "test: installing openssh-server and rsync (apt-get)"
    apt-get -qq update || true
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install --no-install-recommends \
        openssh-server rsync >/dev/null
fi

# A testbed that is up stays up, and so does one that was brought up for these tests alone: the next run is quicker.
test_real() {
    [ "$ONLY" = real-only ] || [ -n "$(docker ps --all --quiet --filter label=clusterctl-testbed)" ] || trap testbed/down.sh EXIT
    testbed/up.sh
    testbed/image.sh "$IMAGE"
    $PYTEST -m real --durations 10
}

# Two at a time. GOMP_SPINCOUNT as in the trainer's own start: threads that spin while they wait would take the core from
# the other worker.
[ -n "$ONLY" ] || GOMP_SPINCOUNT=3000 $PYTEST -n 2 --dist worksteal -m "not engine and not real" --durations 10

if [ "${ENGINE:-yes}" = no ]; then
    name_tests_not_run "as asked (ENGINE=no)"
elif "$HERE/engine.sh"; then
    "$HERE/image.sh" "$IMAGE"
    [ "$ONLY" = real-only ] || $PYTEST -m engine
    [ "$ONLY" = engine-only ] || test_real
else
    name_tests_not_run "no Docker Engine could be had (see above)"
    [ "${CI:-}" != true ] || exit 1
fi
