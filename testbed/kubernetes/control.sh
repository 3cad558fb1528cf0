#!/bin/bash
# Commands inside the control plane's container.
#
#   control.sh up ADDRESS HOST=ADDRESS...     create keys and users, copy what the hosts need, and start everything
#   control.sh start-all     start what does not run
#   control.sh start | kill | freeze | thaw kube-apiserver      also: etcd, kube-controller-manager, kube-scheduler, dns
#   control.sh answers       exit 0 if all of them run and the API server answers
#   control.sh gpus n1 2     let a node have so many GPUs
set -euo pipefail

SELF=$(cd "$(dirname "$0")" && pwd)
. "$SELF/service.sh"

BIN=/opt/kubernetes           # the built programs
ETC=/etc/kubernetes           # certificates, tokens, kubeconfigs
SHARED=/disks/shared/kubernetes  # /shared/kubernetes on the hosts
SERVICES=(etcd kube-apiserver kube-controller-manager kube-scheduler dns)
export PATH=$BIN:$PATH

ec_key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }

certificates() {
    ec_key ca.key
    openssl req -x509 -new -key ca.key -subj /CN=testbed-ca -days 3650 -out ca.crt \
        -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign
    ec_key apiserver.key
    openssl req -new -key apiserver.key -subj /CN=kube-apiserver -out apiserver.csr
    printf '%s\n' "subjectAltName=IP:$ADDRESS,IP:127.0.0.1,IP:10.96.0.1,DNS:localhost,DNS:kubernetes.default.svc" \
        extendedKeyUsage=serverAuth >apiserver.ext
    openssl x509 -req -in apiserver.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 3650 -extfile apiserver.ext \
        -out apiserver.crt
    openssl genrsa -out service-accounts.key 2048
    openssl rsa -in service-accounts.key -pubout -out service-accounts.pub
}

# user FILE NAME GROUPS [NAMESPACE]: a token, and a kubeconfig that has it. JSON is YAML, too.
user() {
    local token
    token=$(openssl rand -hex 16)
    echo "$token,$2,$2,\"$3\"" >>tokens.csv
    cat >"$1.kubeconfig" <<END
{
  "apiVersion": "v1", "kind": "Config", "current-context": "testbed",
  "clusters": [{"name": "testbed", "cluster": {"server": "https://$ADDRESS:6443", "certificate-authority-data": "$(base64 -w 0 ca.crt)"}}],
  "users": [{"name": "$1", "user": {"token": "$token"}}],
  "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": "$1", "namespace": "${4:-default}"}}]
}
END
}

users() {
    user admin admin system:masters
    user kube-controller-manager system:kube-controller-manager system:masters
    user kube-scheduler system:kube-scheduler ''
    user kube-proxy system:kube-proxy ''
    user dns dns system:masters
    local host name
    for host in "$@"; do user "${host%=*}" "system:node:${host%=*}" system:nodes; done
    for name in ada bob; do user $name $name '' $name; done
}

# What the hosts need, in the folder that they share.
share() {
    rm -rf "${SHARED:?}/bin"
    mkdir -p $SHARED/bin $SHARED/kubeconfig $SHARED/runs
    cp -r $BIN/{kubelet,kube-proxy,pause,cni} "$SELF/socat" $SHARED/bin/
    chmod 700 $SHARED/kubeconfig
    local host
    for host in "$@"; do cp "$ETC/${host%=*}.kubeconfig" $SHARED/kubeconfig/; done
    cp $ETC/kube-proxy.kubeconfig $SHARED/kubeconfig/
}

# The arguments of each service.
arguments_of() {
    local config="--kubeconfig=$1.kubeconfig --authentication-kubeconfig=$1.kubeconfig --authorization-kubeconfig=$1.kubeconfig"
    case $1 in
        etcd) echo --data-dir /var/lib/etcd --unsafe-no-fsync --initial-cluster default=http://127.0.0.1:2380 \
            --{listen,advertise}-client-urls=http://127.0.0.1:2379 --{listen-peer,initial-advertise-peer}-urls=http://127.0.0.1:2380 ;;
        kube-apiserver) echo --etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 --advertise-address="$ADDRESS" \
            --secure-port=6443 --insecure-port=0 --tls-cert-file=apiserver.crt --tls-private-key-file=apiserver.key \
            --client-ca-file=ca.crt --token-auth-file=tokens.csv --authorization-mode=Node,RBAC \
            --service-cluster-ip-range=10.96.0.0/16 --service-node-port-range=30000-30999 \
            --service-account-issuer=https://kubernetes.default.svc --service-account-key-file=service-accounts.pub \
            --service-account-signing-key-file=service-accounts.key --kubelet-preferred-address-types=InternalIP \
            --allow-privileged=true --profiling=false ;;
        # A node that does not report is NotReady after 20 s instead of 40 s.
        kube-controller-manager) echo "$config" --service-account-private-key-file=service-accounts.key --root-ca-file=ca.crt \
            --bind-address=127.0.0.1 --port=0 --leader-elect=false --node-monitor-period=2s --node-monitor-grace-period=20s ;;
        kube-scheduler) echo "$config" --bind-address=127.0.0.1 --port=0 --leader-elect=false ;;
        dns) echo "$ADDRESS" dns.kubeconfig ;;
    esac
}

start() {
    cd $ETC
    local program=$1 arguments
    [ "$1" != dns ] || program=$SELF/dns.py
    read -ra arguments <<<"$(arguments_of "$1")"
    start_service "$1" "$program" "${arguments[@]}"
}

api_answers() { [ "$(timeout 5 kubectl --kubeconfig $ETC/admin.kubeconfig --cache-dir /run/kubectl get --raw /readyz 2>/dev/null)" = ok ]; }

answers() {
    local service
    for service in "${SERVICES[@]}"; do service_runs "$service" || fail "$service does not run"; done
    api_answers || fail "the API server does not answer"
}

start_all() {
    local service
    start etcd
    start kube-apiserver
    until api_answers; do
        service_runs kube-apiserver || fail "kube-apiserver exited at its start"
        sleep 0.1
    done
    for service in "${SERVICES[@]}"; do start "$service"; done
}

up() {
    ADDRESS=$1
    shift
    local host pods=0
    for host in "$@"; do
        ip route replace "10.244.$pods.0/24" via "${host#*=}"
        pods=$((pods + 1))
    done
    mkdir -p $ETC
    cd $ETC
    echo "$ADDRESS" >address
    (umask 077; certificates; users "$@") 2>/var/log/certificates.log
    share "$@"
    start_all
}

ADDRESS=$(cat $ETC/address 2>/dev/null || true)
case ${1:-} in
    up | start | answers) "$@" ;;
    start-all) start_all ;;
    freeze | thaw) "${1}_service" "$2" ;;
    kill) stop_service "$2" -KILL ;;
    gpus) python3 "$SELF/gpus.py" $ETC/admin.kubeconfig "$2" "$3" ;;
    *) fail "unknown: ${1:-nothing}" ;;
esac
