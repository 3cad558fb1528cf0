#!/bin/sh
# Runs the tests: those that need nothing, then an engine, the image and the tests that need both. Nothing is left out
# unsaid; in CI (CI=true) an engine that cannot be had is a failure.
#
#   packaging/test.sh IMAGE [engine-only]        ENGINE=no leaves the engine's tests out and names them
set -eu

IMAGE=$1
HERE=$(dirname "$0")
PYTEST=".venv/bin/python -m pytest"

name_tests_not_run() {
    echo
    echo "NOT RUN, $1. These tests need a Docker Engine:"
    $PYTEST -m engine --collect-only -q | sed -n 's/^\(.*::.*\)/  \1/p'
}

# The tests start an sshd of their own on loopback addresses; all they need is the program.
if ! PATH=$PATH:/usr/sbin command -v sshd >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "test: installing openssh-server and rsync (apt-get)"
    apt-get -qq update || true
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install --no-install-recommends \
        openssh-server rsync >/dev/null
fi

[ "${2:-}" = engine-only ] || $PYTEST -m "not engine"

if [ "${ENGINE:-yes}" = no ]; then
    name_tests_not_run "as asked (ENGINE=no)"
elif "$HERE/engine.sh"; then
    "$HERE/image.sh" "$IMAGE"
    $PYTEST -m engine
else
    name_tests_not_run "no Docker Engine could be had (see above)"
    [ "${CI:-}" != true ] || exit 1
fi
