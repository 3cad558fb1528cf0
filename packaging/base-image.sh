#!/bin/sh
# Print the name of a base image in this machine's Docker Engine. Messages go to stderr.
#
#   BASE_IMAGE=python:3.12-slim packaging/base-image.sh
#
# A missing container image is pulled. If no registry answers, root on Debian gets one built with debootstrap (a minute).
set -eu

WANTED=${BASE_IMAGE:-python:3.12-slim}
LOCAL=trainer-base:trixie
ANSWER_TIMEOUT_S=20
PULL_TIMEOUT_S=900

say() { echo "base image: $*" >&2; }
have() { docker image inspect "$1" >/dev/null 2>&1; }

# Two timeouts: a short one for the registry's answer, a long one for the layers.
pull() {
    log=$(mktemp)
    timeout "$PULL_TIMEOUT_S" docker pull "$1" >"$log" 2>&1 &
    pull_pid=$!
    waited=0
    while kill -0 "$pull_pid" 2>/dev/null && ! grep -q 'Pulling from' "$log"; do
        if [ "$waited" -ge "$ANSWER_TIMEOUT_S" ]; then
            kill "$pull_pid" 2>/dev/null || true
            echo "no answer in $ANSWER_TIMEOUT_S s" >>"$log"
            break
        fi
        sleep 1
        waited=$((waited + 1))
    done
    if wait "$pull_pid"; then rm -f "$log"; return 0; fi
    say "cannot pull $1: $(tail -n 1 "$log")"
    rm -f "$log"
    return 1
}

build_from_debian() {
    root=$(mktemp -d /var/tmp/trainer-base.XXXXXX)
    trap 'rm -rf "$root"' EXIT
    chmod 755 "$root"
    say "INSTEAD OF $WANTED: building $LOCAL from Debian 13's packages (debootstrap, about a minute)"
    if ! debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv \
        trixie "$root" "$("$(dirname "$0")/debian-mirror.sh")" >"$root.log" 2>&1; then
        tail -n 5 "$root.log" >&2
        say "debootstrap failed; its log is $root.log"
        return 1
    fi
    rm -rf "$root.log" "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/var/log/* \
        "$root"/etc/hostname "$root"/etc/resolv.conf
    tar -C "$root" --one-file-system -c . |
        docker import --change 'ENV LANG=C.UTF-8' --change 'CMD ["bash"]' - "$LOCAL" >/dev/null
}

if have "$WANTED" || { say "pulling $WANTED" && pull "$WANTED"; }; then
    echo "$WANTED"
elif [ -n "${BASE_IMAGE:-}" ]; then
    say "BASE_IMAGE=$WANTED cannot be pulled; use a container image that this machine can reach"
    exit 1
elif have "$LOCAL"; then
    say "INSTEAD OF $WANTED: using $LOCAL, built on this machine before"
    echo "$LOCAL"
elif [ "$(id -u)" = 0 ] && command -v debootstrap >/dev/null && [ -e /usr/share/debootstrap/scripts/trixie ] &&
    [ -e /usr/share/keyrings/debian-archive-keyring.gpg ]; then
    build_from_debian
    say "built $LOCAL"
    echo "$LOCAL"
else
    say "name a container image with python3 and venv that this machine can reach: make image BASE_IMAGE=NAME"
    say "or run this again on Debian as root with debootstrap installed, to build one"
    exit 1
fi
