#!/bin/sh
# Install and start a Docker Engine with compose v2 and buildx. Safe to repeat.
#
#   packaging/engine.sh           install and start missing parts (Debian, as root)
#   packaging/engine.sh --check   only list missing parts, and exit 1 if any is missing
set -eu

HERE=$(dirname "$0")
LOG=${DOCKERD_LOG:-/var/log/dockerd.log}
PLUGINS=/usr/local/lib/docker/cli-plugins
START_TIMEOUT_S=60
COMPOSE=2.23.1

say() { echo "engine: $*"; }
fail() { echo "engine: $*" >&2; exit 1; }

engine_answers() { timeout 20 docker info >/dev/null 2>&1; }
compose_works() {
    found=$(docker compose version --short 2>/dev/null) && printf '%s\n' "$COMPOSE" "${found#v}" | sort --version-sort --check=quiet
}
buildx_works() { docker buildx version >/dev/null 2>&1; }
all_works() { engine_answers && compose_works && buildx_works; }

missing() {
    command -v docker >/dev/null || echo "the docker command"
    engine_answers || echo "a Docker Engine that answers${DOCKER_HOST:+ (DOCKER_HOST is $DOCKER_HOST)}"
    compose_works || echo "docker compose, version $COMPOSE or newer"
    buildx_works || echo "docker buildx"
}

# Debian 12 has compose 1 and no buildx, but runs Debian 13's plugins, two static files. A separate apt folder checks
# signatures and leaves this machine's sources unchanged.
plugins_from_trixie() {
    say "taking docker-compose and docker-buildx from Debian 13's packages"
    apt=$(mktemp -d)
    trap 'rm -rf "$apt"' EXIT
    mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$apt/parts" "$PLUGINS"
    chmod 755 "$apt"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $("$HERE/debian-mirror.sh") trixie main" >"$apt/sources.list"
    set -- -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts="$apt/parts" \
        -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt" -o APT::Sandbox::User=root -qq
    apt-get "$@" update
    (cd "$apt" && apt-get "$@" download docker-compose docker-buildx)
    for package in docker-compose docker-buildx; do
        dpkg-deb --fsys-tarfile "$apt/$package"_*.deb | tar -x -C "$apt" ./usr/libexec/docker/cli-plugins
        install -m 755 "$apt/usr/libexec/docker/cli-plugins/$package" "$PLUGINS/$package"
        say "installed $PLUGINS/$package"
    done
}

install_missing() {
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC1091
    release=$(. /etc/os-release && echo "${VERSION_ID:-13}")
    packages="iptables debootstrap ca-certificates"
    [ -n "${DOCKER_HOST:-}" ] || command -v dockerd >/dev/null || packages="$packages docker.io"
    [ "${release%%.*}" -lt 13 ] || packages="$packages docker-cli docker-compose docker-buildx"
    # shellcheck disable=SC2086
    if ! dpkg -s $packages >/dev/null 2>&1; then
        say "installing $packages (apt-get)"
        apt-get -qq update || say "some package lists could not be updated"
        apt-get -qq -o DPkg::Lock::Timeout=300 install --no-install-recommends $packages >/dev/null
    fi
    if ! { compose_works && buildx_works; }; then plugins_from_trixie; fi
}

start_engine() {
    if [ -d /run/systemd/system ]; then
        say "starting the docker service (systemd)"
        systemctl start docker
    else
        say "starting dockerd, its log is $LOG"
        setsid dockerd >"$LOG" 2>&1 </dev/null &
        dockerd_pid=$!
    fi
    waited=0
    until engine_answers; do
        if [ "$waited" -ge "$START_TIMEOUT_S" ] || ! kill -0 "${dockerd_pid:-$$}" 2>/dev/null; then
            tail -n 15 "$LOG" >&2 2>/dev/null || true
            fail "dockerd did not come up in $waited s; its log is $LOG"
        fi
        sleep 1
        waited=$((waited + 1))
    done
}

if all_works; then
    say "Docker Engine $(docker version --format '{{.Server.Version}}')," \
        "compose $(docker compose version --short), buildx: ready"
    exit 0
fi

is_debian() { grep -qs '^ID=debian' /etc/os-release; }

missing | sed 's/^/engine: missing: /' >&2
[ "${1:-}" != --check ] || exit 1
if ! is_debian; then
    fail "install them for your system: https://docs.docker.com/engine/install/ (packages docker-ce docker-compose-plugin docker-buildx-plugin), then: sudo systemctl start docker"
elif [ "$(id -u)" != 0 ]; then
    fail "root is required: sudo packaging/engine.sh, then: sudo usermod -aG docker $(id -un), and log in again"
fi

install_missing
if ! engine_answers; then
    [ -z "${DOCKER_HOST:-}" ] || fail "DOCKER_HOST is $DOCKER_HOST but no engine answers there; unset it to use this machine's engine"
    start_engine
fi
all_works || { missing | sed 's/^/engine: still missing: /' >&2; exit 1; }
say "Docker Engine $(docker version --format '{{.Server.Version}}')," \
    "compose $(docker compose version --short), buildx: ready"
