#!/bin/sh
# Start three hosts on this machine: n0, n1, n2, each with its own address, sshd, Docker Engine and Slurm. Safe to repeat.
set -eu

HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/settings.sh"

"$HERE/../packaging/engine.sh" --check >/dev/null || fail "no Docker Engine; to install one: make engine"

build_node_image() {
    base=$(base_image)
    log=$(mktemp)
    say "building $NODE_IMAGE on $base (two minutes at first, seconds later)"
    if ! docker buildx build --load --progress plain --build-arg BASE_IMAGE="$base" --tag "$NODE_IMAGE" "$HERE" >"$log" 2>&1; then
        tail -n 30 "$log" >&2
        fail "the build of $NODE_IMAGE failed; its log is $log"
    fi
    rm -f "$log"
}

start_host() {
    host=$1
    set --
    for other in $HOSTS; do
        [ "$other" = "$host" ] || set -- "$@" --add-host "$other:$(address "$other")"
    done
    run_node --detach --init --name "$(container "$host")" --hostname "$host" --network "$NAME" --ip "$(address "$host")" "$@" \
        "$NODE_IMAGE" serve >/dev/null
}

# Write the login files: the private key, the host keys, and an ssh_config that names both.
write_state() {
    mkdir -p "$STATE"
    chmod 700 "$STATE"
    (umask 077 && run_node --rm --entrypoint cat "$NODE_IMAGE" /disks/keys/id_ed25519 >"$STATE/id_ed25519.new")
    mv "$STATE/id_ed25519.new" "$STATE/id_ed25519"
    for host in $HOSTS; do
        docker exec "$(container "$host")" ssh-keygen -y -f /etc/ssh/ssh_host_ed25519_key |
            awk -v host="$host,$(address "$host")" '{ print host, $1, $2 }'
    done >"$STATE/known_hosts"
    for host in $HOSTS; do
        printf 'Host %s\n    HostName %s\n' "$host" "$(address "$host")"
    done >"$STATE/ssh_config"
    cat >>"$STATE/ssh_config" <<EOF
Host $HOSTS
    User root
    IdentityFile $STATE/id_ed25519
    IdentitiesOnly yes
    UserKnownHostsFile $STATE/known_hosts
    StrictHostKeyChecking yes
EOF
}

docker image inspect "$NODE_IMAGE" >/dev/null 2>&1 || build_node_image
docker network inspect "$NAME" >/dev/null 2>&1 || docker network create --label "$NAME" --subnet "$NET.0/24" "$NAME" >/dev/null
docker volume inspect "$NAME" >/dev/null 2>&1 || docker volume create --label "$NAME" "$NAME" >/dev/null
# shellcheck disable=SC2086
run_node --rm "$NODE_IMAGE" prepare $HOSTS
started=$(date +%s)
for host in $HOSTS; do
    case $(state_of "$host") in
        '') start_host "$host" ;;
        running | restarting) ;;
        paused) docker unpause "$(container "$host")" >/dev/null ;;
        *) docker start "$(container "$host")" >/dev/null ;;
    esac
done
for host in $HOSTS; do wait_until_up "$host"; done
write_state
for host in $HOSTS; do
    image=$(docker container inspect --format '{{.Config.Image}}' "$(container "$host")")
    [ "$image" = "$NODE_IMAGE" ] || say "$host is from another version of testbed/ ($image); to replace it: make testbed-down testbed"
done
say "$HOSTS up after $(($(date +%s) - started)) s; log in: ssh -F $STATE/ssh_config n0 (or ada@n0)"
