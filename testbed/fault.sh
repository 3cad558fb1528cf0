#!/bin/sh
# Inject a fault into a host of the testbed, or undo it. Safe to repeat.
#
#   testbed/fault.sh kill n1              power off: all processes end                      start n1: power on
#   testbed/fault.sh freeze n1            suspends all processes                            thaw n1
#   testbed/fault.sh cut n1 [SECONDS]     drops all packets: connections hang               join n1
#   testbed/fault.sh slow n1 [20mbit]     limits the rate of outgoing traffic               fast n1
#   testbed/fault.sh fill n1              fills /data, a disk of 300 MB                     empty n1
#   testbed/fault.sh restart-engine n1    restarts the Docker Engine, as a package upgrade does
#   testbed/fault.sh drop-ssh n1          ends every SSH session; sshd accepts new ones
#   testbed/fault.sh heal [n1 ...]        undoes all of these (default: on every host)
set -eu

HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/settings.sh"

usage() { sed -n 's/^#   \(testbed\)/  \1/p' "$0" >&2; exit 2; }
on() { host=$1; shift; docker exec "$(container "$host")" "$@"; }

heal() {
    case $(state_of "$1") in
        paused) docker unpause "$(container "$1")" >/dev/null ;;
        running) ;;
        *) docker start "$(container "$1")" >/dev/null; wait_until_up "$1" ;;
    esac
    on "$1" testbed-node heal
}

fault=${1:-}
[ $# -ge 2 ] || [ "$fault" = heal ] || usage
shift
if [ "$fault" = heal ]; then
    # shellcheck disable=SC2086
    [ $# -gt 0 ] || set -- $HOSTS
    for host in "$@"; do heal "$host"; done
    exit 0
fi

host=$1
state=$(state_of "$host")
case " $HOSTS " in *" $host "*) ;; *) fail "no host $host; the hosts are $HOSTS" ;; esac
case "$fault $state" in
    *" ") fail "$host is not running; type: make testbed" ;;
    "kill exited" | "freeze paused" | "thaw running" | "start running") ;;
    "kill paused") docker unpause "$(container "$host")" >/dev/null; docker kill "$(container "$host")" >/dev/null ;;
    "kill running") docker kill "$(container "$host")" >/dev/null ;;
    "start "*) docker start "$(container "$host")" >/dev/null; wait_until_up "$host" ;;
    "freeze running") docker pause "$(container "$host")" >/dev/null ;;
    "thaw paused") docker unpause "$(container "$host")" >/dev/null ;;
    *" paused" | *" exited") fail "$host is $state; testbed/fault.sh heal $host" ;;
    "cut "*)
        drop="iptables -t mangle -I PREROUTING -i eth0 -j DROP; iptables -t mangle -I POSTROUTING -o eth0 -j DROP"
        on "$host" sh -c "$drop${2:+; sleep $2; testbed-node join}"
        ;;
    "slow "*) on "$host" tc qdisc replace dev eth0 root tbf rate "${2:-20mbit}" burst 64kb latency 400ms ;;
    "fill "*) on "$host" sh -c 'dd if=/dev/zero of=/data/filler bs=1M 2>/dev/null || true' ;;
    "join "* | "fast "* | "empty "*) on "$host" testbed-node "$fault" ;;
    "restart-engine "*) on "$host" testbed-node stop-engine; on "$host" testbed-node engine ;;
    "drop-ssh "*) on "$host" sh -c 'pkill -KILL -x sshd-session || true' ;;
    *) usage ;;
esac
