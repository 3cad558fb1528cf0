# shellcheck shell=bash disable=SC2154
# Runs on each node before agent.pyz, outside of the container: reads secrets, chooses the network device, enters the
# container, and keeps the exit code. In the container, agent.pyz runs the setup commands and starts the ranks.
# Above it, backends/script.py writes `enter` and `arguments` (the command, before and after the runtime's options) and the
# runtime's functions, agent/own_folder.sh and agent/wait.sh. Above these are agent/node_start.sh and the job's own lines.

# A container has its own. The agent sets it for the ranks.
CLUSTER_UMASK=$(umask)
export CLUSTER_UMASK

# Other users may share the run directory.
if [ -n "${CLUSTER_CACHE_DIR:-}" ]; then
    folder=$(own_folder "$CLUSTER_CACHE_DIR" "$(id -u)" "$out/$CLUSTER_NODE.pid") || fail "$folder"
    CLUSTER_CACHE_DIR=$folder
fi
if [ -n "${CLUSTER_SETUP_DIR:-}" ]; then
    folder=$(own_folder "${CLUSTER_SETUP_DIR%/*}" "$(id -u)" "$out/$CLUSTER_NODE.pid") || fail "$folder"
    CLUSTER_SETUP_DIR=$folder/${CLUSTER_SETUP_DIR##*/}
fi

# Secrets are in a file with mode 600, or in the environment, and never in the plan. Slurm keeps them in one variable.
# shellcheck disable=SC1090
[ ! -e "$out/$CLUSTER_NODE.secrets" ] || . "$out/$CLUSTER_NODE.secrets"
rm -f -- "$out/$CLUSTER_NODE.secrets"
eval "${CLUSTER_SECRET_VALUES:-}"
unset CLUSTER_SECRET_VALUES
secrets=${CLUSTER_SECRETS:-}
for name in ${secrets//,/ }; do
    [ -n "${!name+set}" ] || fail "the secret $name has no value: export $name"
done

# gloo and NCCL may select docker0 or lo: choose the device that has the node's address, or is on the route to a peer.
read -r -a hosts <<< "${CLUSTER_HOSTS:-}"
peer=${CLUSTER_NODE_ADDRESS:-${hosts[$((PET_NODE_RANK == 0))]:-}}
case $peer in
"") device=${hosts[0]:+lo} ;; # the only node of a Slurm job
127.*) device=lo ;;
*)
    PATH=$PATH:/usr/sbin:/sbin # of ip
    read -r number _ < <(getent ahosts "$peer") || fail "the name $peer does not resolve"
    source=$(ip -o route get "$number" 2>&1 | sed -n 's/.* src \([^ ]*\).*/\1/p')
    [ -n "$source" ] || fail "no route to $peer: $(ip -o route get "$number" 2>&1)"
    read -r _ device _ < <(ip -o addr show to "$source") || fail "no network device has the address $source" ;;
esac
if [ -n "$device" ]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$device}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$device}"
fi

# The site's variables enter the container, too: those whose names begin with a word of `passed`.
site=()
for prefix in "${passed[@]:-}"; do
    [ -z "$prefix" ] || mapfile -t -O "${#site[@]}" site < <(compgen -e "$prefix")
done

# A name may get another image. The setup's virtual environment belongs to one: its ID, or the date of its file.
if [ -n "${CLUSTER_IMAGE:-}" ]; then
    if [ "$(type -t image_id)" = function ]; then id=$(image_id); else id=$(stat -L -c '%s %Y' -- "$CLUSTER_IMAGE"); fi
    CLUSTER_IMAGE+=" $id"
fi 2>/dev/null

# The runtime's options that depend on the machine
options=()
[ "$(type -t prepare)" != function ] || prepare

# shellcheck disable=SC2317,SC2329
agent_pid() { grep -m 1 -oE '^[1-9][0-9]*' -- "$out/$CLUSTER_NODE.agent"; }
# shellcheck disable=SC2317,SC2329
forward() {
    local target=$child
    [ "$(type -t signal_pid)" != function ] || target=$(signal_pid)
    kill -s "$1" "${target:-$child}" 2>/dev/null
}
# Runs the node, and sets `code`.
run() {
    trap '' USR2
    "${enter[@]}" "${options[@]}" "${arguments[@]}" 2> "$out/$CLUSTER_NODE.err" &
    child=$!
    trap 'stopped=yes; forward TERM' TERM INT
    trap 'forward USR2' USR2
    wait_for "$child"
}
stopped=
run
# A runtime may fail for a moment, for example while it mounts the image for another job. The agent did not start.
if [ "$code" = "${start_failure:-}" ] && [ -z "$stopped" ] && [ ! -e "$out/$CLUSTER_NODE.json" ]; then
    echo "$runtime: exit code $code, once more: $(tail -n 1 "$out/$CLUSTER_NODE.err")" >> "$out/$CLUSTER_NODE.log"
    sleep 1
    [ -n "$stopped" ] || run
fi
[ -z "${alive:-}" ] || kill -KILL "$alive" 2>/dev/null
end "$code"
