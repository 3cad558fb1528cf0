#!/bin/sh
# Write requirements/*.txt from pyproject.toml: pinned versions with hashes, for Python 3.10 to 3.13. Existing versions
# are kept if they fit; packaging/lock.sh --upgrade takes the newest.
set -eu

[ -x .make/uv/bin/uv ] || { python3 -m venv .make/uv && .make/uv/bin/pip install --quiet uv; }
export UV_CUSTOM_COMPILE_COMMAND="make lock"
lock() {
    .make/uv/bin/uv pip compile --quiet --no-config --universal --python-version 3.10 --generate-hashes "$@" pyproject.toml
}
lock --extra trainer --output-file requirements/trainer.txt "$@"
lock --extra trainer --extra export --extra metrics --extra transformers --extra dev --constraint requirements/trainer.txt --output-file requirements/dev.txt "$@"
