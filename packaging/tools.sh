#!/bin/sh
# Install the pinned programs of requirements/tools.txt, uv and build, into .make/tools.
set -eu

ready=.make/tools/.ready
if ! [ -e "$ready" ] || [ requirements/tools.txt -nt "$ready" ]; then
    rm -rf .make/tools
    python3 -m venv .make/tools
    .make/tools/bin/pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements/tools.txt
    touch "$ready"
fi
