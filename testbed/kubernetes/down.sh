#!/bin/sh
# Remove Kubernetes from the testbed: pods, kubelets, control plane. Safe to repeat. The hosts stay up.
# The built programs stay in the cache; `testbed/kubernetes/down.sh --cache` removes them too.
set -eu

KUBERNETES=$(cd "$(dirname "$0")" && pwd)
. "$KUBERNETES/settings.sh"

for host in $HOSTS; do
    case $(state_of "$host") in
        '') continue ;;
        running) ;;
        *) "$HERE/fault.sh" heal "$host" ;;
    esac
    if docker exec "$(container "$host")" test -d /shared/kubernetes; then
        send_scripts "$host"
        on_node "$host" down
    fi
done
for host in $HOSTS; do
    if [ -n "$(state_of "$host")" ]; then docker exec "$(container "$host")" rm -rf --one-file-system /shared/kubernetes; fi
done
docker rm --force "$CONTROL" >/dev/null 2>&1 || true
rm -rf "$FILES"
[ "${1:-}" != --cache ] || rm -rf "$(dirname "$BINARIES")"/kubernetes-*
say "removed Kubernetes$([ "${1:-}" = --cache ] || echo ", except the programs in $BINARIES (testbed/kubernetes/down.sh --cache)")"
