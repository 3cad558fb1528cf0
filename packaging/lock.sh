#!/bin/sh
# Write requirements/*.txt from pyproject.toml: pinned versions with hashes, for Python 3.10 to 3.13. Existing versions
# are kept if they fit; packaging/lock.sh --upgrade takes the newest. uv and build are pinned too, in tools.txt.
set -eu

packaging/tools.sh
export UV_CUSTOM_COMPILE_COMMAND="make lock"
lock() {
    .make/tools/bin/uv pip compile --quiet --no-config --universal --python-version 3.10 --generate-hashes "$@"
}
lock pyproject.toml --extra trainer --output-file requirements/trainer.txt "$@"
lock pyproject.toml --extra trainer --extra transformers --extra export --extra metrics --extra dev --constraint requirements/trainer.txt --output-file requirements/dev.txt "$@"
lock requirements/tools.in --constraint requirements/dev.txt --output-file requirements/tools.txt "$@"
