#!/bin/sh
# Runs tests and sets up what they need.
#
#   packaging/test.sh IMAGE          all tests except those on the testbed. IMAGE is built where it is missing or outdated
#   packaging/test.sh IMAGE real     the tests on the three hosts of the testbed
#
# Without a Docker Engine the tests that need one are listed and not run; with CI=true that is a failure. ENGINE=no skips
# them on purpose.
set -eu

IMAGE=$1
HERE=$(dirname "$0")
# Threads that spin while they wait would take the core from the other worker: the value of the trainer's own start.
export GOMP_SPINCOUNT=3000
PYTEST=".venv/bin/python -m pytest"

list_tests_not_run() {
    echo
    echo "NOT RUN, $1. These tests need a Docker Engine:"
    $PYTEST -m "$2" --collect-only -q | sed -n 's/^\(.*::.*\)/  \1/p'
    [ "${ENGINE:-yes}" = no ] || [ "${CI:-}" != true ]
}

# The tests start their own sshd on loopback addresses; they need only the program.
if ! PATH=$PATH:/usr/sbin command -v sshd >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "test: installing openssh-server and rsync (apt-get)"
    apt-get -qq update || true
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install --no-install-recommends \
        openssh-server rsync >/dev/null
fi

missing=
if [ "${ENGINE:-yes}" = no ]; then
    missing="as asked (ENGINE=no)"
elif ! "$HERE/engine.sh"; then
    missing="no Docker Engine (see above)"
else
    "$HERE/image.sh" "$IMAGE"
fi

if [ "${2:-}" != real ]; then
    $PYTEST -n 3 --dist worksteal -m "not real${missing:+ and not engine}" --durations 10
    [ -z "$missing" ] || list_tests_not_run "$missing" engine
elif [ -n "$missing" ]; then
    list_tests_not_run "$missing" real
else
    # CI leaves no testbed behind; for a person it stays up, so that the next run starts at once.
    [ "${CI:-}" != true ] || [ -n "$(docker ps --all --quiet --filter label=clusterctl-testbed)" ] || trap testbed/down.sh EXIT
    testbed/up.sh
    testbed/image.sh "$IMAGE"
    $PYTEST -m real --durations 10
fi
