#!/bin/sh
# Start Kubernetes on the testbed: a control plane in a container of its own, and a kubelet on each host. Safe to repeat.
set -eu

KUBERNETES=$(cd "$(dirname "$0")" && pwd)
. "$KUBERNETES/settings.sh"

UP_TIMEOUT_S=180

addresses() { for host in $HOSTS; do echo "$host=$(address "$host")"; done; }

start_control() {
    "$KUBERNETES/down.sh" >/dev/null
    # shellcheck disable=SC2086
    run_node --detach --init --name "$CONTROL" --hostname control --network "$NAME" --ip "$CONTROL_ADDRESS" \
        --volume "$BINARIES:/opt/kubernetes:ro" --entrypoint sleep "$NODE_IMAGE" infinity >/dev/null
    docker exec "$CONTROL" mkdir /opt/testbed
    tar -C "$KUBERNETES" -c control.sh service.sh dns.py gpus.py socat | docker exec --interactive "$CONTROL" tar -x -C /opt/testbed
    # shellcheck disable=SC2046
    on_control up "$CONTROL_ADDRESS" $(addresses)
}

start_nodes() {
    number=0
    for host in $HOSTS; do
        send_scripts "$host"
        # shellcheck disable=SC2046
        on_node "$host" up "$(address "$host")" "$number" "$CONTROL_ADDRESS" $(addresses)
        number=$((number + 1))
    done
}

# Print the first thing that is missing, as: CONTAINER LOG what is missing. Nothing if all is usable.
missing() {
    status='{.status.phase}{.status.conditions[?(@.type=="Ready")].status}={.status.allocatable.nvidia\.com/gpu}'
    found=$(kubectl get serviceaccounts,persistentvolumeclaims,nodes --all-namespaces \
        --output "jsonpath={range .items[*]}{.kind}/{.metadata.namespace}/{.metadata.name}=$status,{end}" 2>/dev/null) ||
        { echo "$CONTROL kube-apiserver the API server does not answer"; return; }
    for namespace in $NAMESPACES; do
        case "$found" in
            *"ServiceAccount/$namespace/default="*"PersistentVolumeClaim/$namespace/runs=Bound="*) ;;
            *"ServiceAccount/$namespace/default="*) echo "$CONTROL kube-controller-manager the claim runs in $namespace is not bound"; return ;;
            *) echo "$CONTROL kube-controller-manager the namespace $namespace has no service account"; return ;;
        esac
    done
    for host in $HOSTS; do
        case "$found" in
            *"Node//$host=True=$GPUS,"*) ;;
            *"Node//$host=True="*)
                on_control gpus "$host" "$GPUS" 2>/dev/null || true
                echo "$(container "$host") kubelet the node $host has not got $GPUS GPUs"
                return ;;
            *"Node//$host="*) echo "$(container "$host") kubelet the node $host is not Ready"; return ;;
            *) echo "$(container "$host") kubelet the node $host has not registered"; return ;;
        esac
    done
}

all_run() {
    is_running "$CONTROL" && on_control answers >/dev/null 2>&1 || return 1
    for host in $HOSTS; do
        is_running "$(container "$host")" && on_node "$host" answers >/dev/null 2>&1 || return 1
    done
}

wait_until_usable() {
    until=$(($(date +%s) + UP_TIMEOUT_S))
    while found=$(missing) && [ -n "$found" ]; do
        if [ "$(date +%s)" -ge "$until" ]; then
            log=${found#* }
            docker exec "${found%% *}" tail -n 15 "/var/log/${log%% *}.log" >&2 || true
            fail "after $UP_TIMEOUT_S s: ${log#* }; the lines above are from /var/log/${log%% *}.log in ${found%% *}"
        fi
        sleep 0.2
    done
}

"$KUBERNETES/build.sh" >/dev/null
started=$(date +%s)
if all_run; then
    [ -e "$FILES/bob.kubeconfig" ] || write_files
else
    for host in $HOSTS; do is_running "$(container "$host")" || { "$HERE/up.sh"; break; }; done
    if is_running "$CONTROL"; then on_control start-all; else start_control; fi
    write_files
    start_nodes
    kubectl apply --filename "$KUBERNETES/users.yaml" >/dev/null
    for namespace in $NAMESPACES; do
        docker exec "$CONTROL" install -d -m 1777 "/disks/shared/kubernetes/runs/$namespace"
        sed "s/NAMESPACE/$namespace/g" "$KUBERNETES/volume.yaml" | kubectl apply --filename - >/dev/null
    done
fi
wait_until_usable
say "Kubernetes $VERSION on $HOSTS is up after $(($(date +%s) - started)) s:"
for user in admin ada bob; do say "  $FILES/kubectl --kubeconfig $FILES/$user.kubeconfig get pods"; done
