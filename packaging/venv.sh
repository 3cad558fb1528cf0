#!/bin/sh
# Create .venv with the pinned packages and this project, editable. PYTHON=python3.12 sets the interpreter.
set -eu

usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

if ! usable .venv/bin/python; then
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 none}; do
        ! usable "$python" || break
    done
    if ! usable "$python"; then
        echo "venv: no Python 3.10 to 3.13 with its venv module${PYTHON:+ (PYTHON is $PYTHON)}" >&2
        echo "hint: on Debian or Ubuntu: apt-get install python3-venv; or name one: make venv PYTHON=/path/to/python3.12" >&2
        exit 1
    fi
    echo "venv: creating .venv with $python ($("$python" --version))"
    rm -rf .venv
    "$python" -m venv .venv
fi

echo "venv: installing the packages of requirements/dev.txt into .venv ($(.venv/bin/python --version), 6.5 GB at first)"
.venv/bin/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements/dev.txt
# The other mode imports a finder at each start of the interpreter, which then takes 21 ms instead of 10.
.venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation \
    --config-settings editable_mode=compat --editable .
