#!/bin/sh
# Run the command as the owner of the run folder. A user without a passwd entry gets a name and a writable home.
set -eu

uid=$(id -u)
run_dir=${CLUSTER_RUN_DIR:-/runs}

if [ "$uid" = 0 ] && [ -d "$run_dir" ] && [ "$(stat -c %u "$run_dir")" != 0 ]; then
    exec setpriv --reuid "$(stat -c %u "$run_dir")" --regid "$(stat -c %g "$run_dir")" --clear-groups --inh-caps=-all \
        -- "$0" "$@"
fi

if [ -n "${CLUSTER_RUN_DIR:-}" ] && [ -d "$run_dir" ] && [ ! -w "$run_dir" ]; then
    echo "entrypoint: $run_dir belongs to uid $(stat -c %u "$run_dir") and cannot be written by uid $uid" >&2
    echo "hint: docker run --user $(stat -c %u:%g "$run_dir") ..." >&2
    exit 2
fi

# docker sets HOME=/ for a uid without passwd entry; after setpriv, HOME is still root's
if [ ! -w "${HOME:-/}" ] || [ "${HOME:-/}" = / ]; then
    HOME=/tmp/home-$uid
    mkdir -m 700 "$HOME" 2>/dev/null || true
    # With Apptainer /tmp is the host's, where another user may have made the folder, with a Python package in it
    case $(stat -c %u:%A "$HOME" 2>/dev/null) in "$uid":drwx?-??-*) ;; *) HOME=$(mktemp -d) ;; esac
fi
LOGNAME=$(id -un 2>/dev/null) || LOGNAME=uid-$uid
USER=$LOGNAME
export HOME LOGNAME USER

exec "$@"
