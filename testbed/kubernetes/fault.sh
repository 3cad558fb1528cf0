#!/bin/sh
# Inject a fault into Kubernetes on the testbed, or undo it. Safe to repeat. The hosts' own faults: testbed/fault.sh
#
#   testbed/kubernetes/fault.sh kubelet-kill n1       its pods run on                              kubelet-start n1
#   testbed/kubernetes/fault.sh kubelet-freeze n1     it accepts connections and never answers     kubelet-thaw n1
#   testbed/kubernetes/fault.sh api-kill              the API server dies; pods run on             api-start
#   testbed/kubernetes/fault.sh api-freeze            it accepts connections and never answers     api-thaw
#   testbed/kubernetes/fault.sh cut n1 [SECONDS]      drops all packets of the node and its pods   join n1
#   testbed/kubernetes/fault.sh quota ada 2           the namespace may use 2 GPUs                 no-quota ada
#   testbed/kubernetes/fault.sh gpus n1 0             the node has so many GPUs                    gpus n1 2
#   testbed/kubernetes/fault.sh busy n1               a pod in kube-system uses the node's GPUs    free n1
#   testbed/kubernetes/fault.sh heal                  undoes all of these, also `kubectl cordon`
set -eu

KUBERNETES=$(cd "$(dirname "$0")" && pwd)
. "$KUBERNETES/settings.sh"

WAIT_S=60
FAULT=testbed-fault  # the name of quotas, and the label of quotas and pods

usage() { sed -n 's/^#   \(testbed\)/  \1/p' "$0" >&2; exit 2; }

# wait_for WHAT COMMAND...: until the command succeeds
wait_for() {
    what=$1
    shift
    until=$(($(date +%s) + WAIT_S))
    until "$@"; do
        [ "$(date +%s)" -lt "$until" ] || fail "not after $WAIT_S s: $what"
        sleep 0.1
    done
}

api_answers() { on_control answers >/dev/null 2>&1; }
gpus_are() { [ "$(kubectl get node "$1" --output 'jsonpath={.status.allocatable.nvidia\.com/gpu}')" = "$2" ]; }
quota_counts() { [ -n "$(kubectl get quota $FAULT --namespace "$1" --output 'jsonpath={.status.hard}')" ]; }

quota() {
    no_quota "$1"
    kubectl create quota $FAULT --namespace "$1" --hard "requests.nvidia.com/gpu=$2" >/dev/null
    kubectl label quota $FAULT --namespace "$1" $FAULT=quota >/dev/null
    wait_for "the quota of the namespace $1 is counted" quota_counts "$1"
}
no_quota() { kubectl delete quota $FAULT --namespace "$1" --ignore-not-found >/dev/null; }

gpus() {
    on_control gpus "$1" "$2"
    wait_for "the node $1 has $2 GPUs" gpus_are "$1" "$2"
}

busy() {
    kubectl apply --filename - >/dev/null <<END
apiVersion: v1
kind: Pod
metadata: {name: busy-$1, namespace: kube-system, labels: {$FAULT: busy}}
spec:
  nodeSelector: {kubernetes.io/hostname: $1}
  containers: [{name: busy, image: "pause:0.1", imagePullPolicy: Never, resources: {limits: {nvidia.com/gpu: "$GPUS"}}}]
END
    kubectl wait --namespace kube-system --for condition=Ready "pod/busy-$1" --timeout "${WAIT_S}s" >/dev/null
}
free() { kubectl delete pod "busy-$1" --namespace kube-system --ignore-not-found >/dev/null; }

api_start() {
    on_control start kube-apiserver
    wait_for "the API server answers" api_answers
}

heal() {
    "$HERE/fault.sh" heal
    on_control thaw kube-apiserver
    for host in $HOSTS; do on_node "$host" thaw kubelet; done
    "$KUBERNETES/up.sh" >/dev/null
    # shellcheck disable=SC2086
    kubectl uncordon $HOSTS >/dev/null
    kubectl delete pod,quota --all-namespaces --selector $FAULT >/dev/null
}

is_running "$CONTROL" || fail "Kubernetes does not run; type: make testbed-kubernetes"
case "${1:-} ${2:-}" in
    "heal " | "api-"*" ") ;;
    "quota "?* | "no-quota "?*) ;;
    *" "?*) case " $HOSTS " in *" $2 "*) ;; *) fail "no host $2; the hosts are $HOSTS" ;; esac ;;
    *) usage ;;
esac
case "$1 $#" in
    "kubelet-kill 2") on_node "$2" kill kubelet ;;
    "kubelet-start 2") on_node "$2" start kubelet ;;
    "kubelet-freeze 2") on_node "$2" freeze kubelet ;;
    "kubelet-thaw 2") on_node "$2" thaw kubelet ;;
    "api-kill 1") on_control kill kube-apiserver ;;
    "api-start 1") api_start ;;
    "api-freeze 1") on_control freeze kube-apiserver ;;
    "api-thaw 1") on_control thaw kube-apiserver ;;
    "cut "[23] | "join 2") "$HERE/fault.sh" "$@" ;;
    "quota 3") quota "$2" "$3" ;;
    "no-quota 2") no_quota "$2" ;;
    "gpus 3") gpus "$2" "$3" ;;
    "busy 2") busy "$2" ;;
    "free 2") free "$2" ;;
    "heal 1") heal ;;
    *) usage ;;
esac
