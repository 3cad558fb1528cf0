#!/bin/bash
# Commands inside a host, run as root from the hosts' shared folder.
#
#   node.sh up ADDRESS NUMBER DNS HOST=ADDRESS...    start kubelet and kube-proxy; safe to repeat
#   node.sh start | kill | freeze | thaw kubelet      also: kube-proxy; `start` needs `up` before
#   node.sh answers      exit 0 if both run
#   node.sh down         end them and every pod, and undo what `up`, they and the pods changed
set -euo pipefail

SHARED=/shared/kubernetes
. $SHARED/service.sh

# Set by `up`: this host's address and number, the DNS server's address, and HOST=ADDRESS of every host.
ADDRESS='' NUMBER='' DNS='' HOSTS=''
RUN=/run/kubernetes  # this start's settings; /run is empty after a boot
PODS=10.244          # the first half of every pod's address
PAUSE=pause:0.1
export PATH=$SHARED/bin:$PATH

# The kubelet sets these for the whole machine if they differ. It reads and writes a file of this host instead.
TUNABLES=(vm/overcommit_memory=1 kernel/panic=10 kernel/panic_on_oops=1)

hide_tunables() {
    local tunable file
    for tunable in "${TUNABLES[@]}"; do
        file=/proc/sys/${tunable%=*}
        if mountpoint -q "$file"; then continue; fi
        echo "${tunable#*=}" >"$RUN/${file##*/}"
        mount --bind "$RUN/${file##*/}" "$file"
    done
}

write_network() {
    mkdir -p /etc/cni/net.d
    cat >/etc/cni/net.d/10-pods.conflist <<END
{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true, "ipam": {
    "type": "host-local", "ranges": [[{"subnet": "$PODS.$NUMBER.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
END
    local direction number=0 host
    for host in $HOSTS; do
        [ "$number" = "$NUMBER" ] || ip route replace "$PODS.$number.0/24" via "${host#*=}"
        number=$((number + 1))
    done
    for direction in -s -d; do
        iptables -C FORWARD $direction $PODS.0.0/16 -j ACCEPT 2>/dev/null || iptables -I FORWARD $direction $PODS.0.0/16 -j ACCEPT
    done
}

arguments_of() {
    local common
    common="--kubeconfig=$SHARED/kubeconfig/$1.kubeconfig --hostname-override=$(hostname) --oom-score-adj=0"
    case $1 in
        # The last line but one keeps the kubelet from deleting container images on a full disk.
        kubelet) echo "${common/kubelet.kubeconfig/$(hostname).kubeconfig}" --node-ip="$ADDRESS" --address="$ADDRESS" --port=10250 \
            --read-only-port=0 --healthz-port=0 --anonymous-auth=true --authorization-mode=AlwaysAllow \
            --container-runtime=docker --pod-infra-container-image=$PAUSE --network-plugin=cni --cni-bin-dir=$SHARED/bin/cni \
            --cgroup-driver=cgroupfs --cgroups-per-qos=false --enforce-node-allocatable= --fail-swap-on=false \
            --image-gc-high-threshold=100 --eviction-hard='memory.available<100Mi' --serialize-image-pulls=false \
            --cluster-dns="$DNS" --cluster-domain=cluster.local --node-status-update-frequency=1s ;;
        kube-proxy) echo "$common" --proxy-mode=iptables --cluster-cidr=$PODS.0.0/16 --conntrack-max-per-core=0 --conntrack-min=0 \
            --conntrack-tcp-timeout-established=0s --conntrack-tcp-timeout-close-wait=0s ;;
    esac
}

start() {
    local arguments
    # shellcheck disable=SC1091
    . $RUN/settings
    read -ra arguments <<<"$(arguments_of "$1")"
    start_service "$1" "$SHARED/bin/$1" "${arguments[@]}"
}

up() {
    mkdir -p $RUN
    printf "ADDRESS=%q NUMBER=%q DNS=%q HOSTS=%q\n" "$1" "$2" "$3" "${*:4}" >$RUN/settings
    # shellcheck disable=SC1091
    . $RUN/settings
    docker image inspect $PAUSE >/dev/null 2>&1 ||
        tar -C $SHARED/bin -c pause | docker import --change 'ENTRYPOINT ["/pause"]' - $PAUSE >/dev/null
    [ -e /dev/kmsg ] || ln -s /dev/null /dev/kmsg  # the kubelet opens it at its start
    hide_tunables
    write_network
    start kubelet
    start kube-proxy
}

down() {
    local service tunable
    for service in kube-proxy kubelet; do stop_service $service; done
    docker ps --all --quiet --filter label=io.kubernetes.pod.namespace | xargs --no-run-if-empty docker rm --force >/dev/null
    # Lazy, because a process of a pod may end later than its container.
    awk '$2 ~ "^/var/lib/kubelet(/|$)" { print $2 }' /proc/mounts | tac | xargs --no-run-if-empty -d '\n' -n 1 umount --lazy
    for tunable in "${TUNABLES[@]}"; do
        if mountpoint -q "/proc/sys/${tunable%=*}"; then umount "/proc/sys/${tunable%=*}"; fi
    done
    iptables-save | grep -v "KUBE\|CNI-\|$PODS\." | iptables-restore
    ip link delete cni0 2>/dev/null || true
    ip route show | awk -v pods="$PODS." 'index($1, pods) == 1 { print $1 }' | xargs --no-run-if-empty -n 1 ip route delete
    sysctl -q net.ipv4.conf.all.route_localnet=0
    if [ -L /dev/kmsg ]; then rm /dev/kmsg; fi
    docker image rm --force $PAUSE >/dev/null 2>&1 || true
    rm -rf --one-file-system $RUN /run/{kubelet,kube-proxy}.pid /run/dockershim.sock /var/lib/{kubelet,dockershim,cni} /etc/cni \
        /var/log/{pods,containers} "$(log_of kubelet)" "$(log_of kube-proxy)"
}

answers() {
    local service
    for service in kubelet kube-proxy; do service_runs $service || fail "$service does not run"; done
}

case ${1:-} in
    up | start | answers | down) "$@" ;;
    freeze | thaw) "${1}_service" "$2" ;;
    kill) stop_service "$2" -KILL ;;
    *) fail "unknown: ${1:-nothing}" ;;
esac
