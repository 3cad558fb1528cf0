# shellcheck shell=sh disable=SC2034,SC1091
# Settings of the Kubernetes scripts, which source this file with KUBERNETES set to this folder.
HERE=$(dirname "$KUBERNETES")
. "$HERE/settings.sh"

VERSION=1.20.2
# The folder's name has a hash of what is built and how, so a change of these causes a new build.
BINARIES=${XDG_CACHE_HOME:-$HOME/.cache}/clusterctl-testbed/kubernetes-$VERSION-$(cd "$KUBERNETES" &&
    cat compile.sh pause.go patches/*.patch | sha256sum | cut -c 1-12)

CONTROL=$NAME-control          # the container of the control plane
CONTROL_ADDRESS=$NET.9         # of the API server and the DNS server
FILES=$STATE/kubernetes        # kubectl, and a kubeconfig per user
NAMESPACES="default ada bob"
GPUS=2                         # per node, simulated

kubectl() { "$FILES/kubectl" --kubeconfig "$FILES/admin.kubeconfig" --cache-dir "$FILES/cache" --request-timeout 20s "$@"; }
on_control() { docker exec "$CONTROL" /opt/testbed/control.sh "$@"; }
on_node() { host=$1; shift; docker exec "$(container "$host")" /shared/kubernetes/node.sh "$@"; }
# Put this checkout's scripts into the folder that all hosts share.
send_scripts() { tar -C "$KUBERNETES" -c node.sh service.sh | docker exec --interactive "$(container "$1")" tar -x -C /shared/kubernetes; }

is_running() { [ "$(docker container inspect --format '{{.State.Status}}' "$1" 2>/dev/null)" = running ]; }

# Copy the kubeconfigs out of the control plane's container, so that each checkout can use the cluster.
write_files() {
    mkdir -p "$FILES"
    ln -sfn "$BINARIES/kubectl" "$FILES/kubectl"
    for user in admin ada bob; do
        (umask 077 && docker exec "$CONTROL" cat "/etc/kubernetes/$user.kubeconfig" >"$FILES/$user.new")
        mv "$FILES/$user.new" "$FILES/$user.kubeconfig"
    done
}
