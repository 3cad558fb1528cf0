# shellcheck shell=bash disable=SC2154
# The body of a batch script: chooses the master and its port, starts the nodes, and requeues the job. Above it,
# batch/__init__.py writes `run` (the job's folder), `nodes`, `port`, `max_restarts`, `first_attempt`, `requeue_after` (the
# ends of a node after which the job is requeued: exit codes, or `nothing`) and `node` (the script of a node), then
# agent/wait.sh. The batch system's own job.sh sets `scheduler` (its name), `number` (the job's), `assigned` (its nodes,
# for the log) and `requeues` (how often it has been requeued), and these functions, which may use `out` (the attempt's
# folder) and `restarts`:
#
# assigned_hosts        prints the hosts of the nodes, one a line
# on_each_node COMMAND  runs a command once on each node
# end_if_refused        exits if the last command of on_each_node or answers was refused, as the next one would be
# start_nodes COMMAND   starts a command on each node in the background, as the process `step`; the first one that fails
#                       ends them all
# signal_nodes SIGNAL   sends a signal to the node's script, whose process id is in `$out/node-RANK.pid`
# answers HOST          whether a command runs on a host; it gives up after 30 s
# is_wanted             whether the batch system still runs the job, which has not been cancelled
# requeue               puts the job back into the queue and does not return, or submits it again
set -u
restarts=$((${CLUSTER_RESTARTS:-0} + requeues))
export CLUSTER_ATTEMPT=$((first_attempt + restarts))
out="$run/attempt-$CLUSTER_ATTEMPT"
echo "attempt $CLUSTER_ATTEMPT is job $number on $assigned"
fail() {
    local code=$1
    shift
    printf 'error: %s\n' "$*" >&2
    exit "$code"
}

# The first node that was assigned is the master. Exit code 78: the nodes do not share the run directory.
[ "$restarts" -le "$max_restarts" ] || fail 75 "it was restarted $max_restarts times (--max-restarts)"
[ -z "${CLUSTER_SUBMITTED:-}" ] || [ -e "$run/submitted" ] || fail 78 "$(hostname): there is no $run"
mkdir -p -- "$out" || fail 78 "$(hostname): cannot make $out"
mapfile -t hosts < <(assigned_hosts)
[ "${#hosts[@]}" = "$nodes" ] || fail 71 "$scheduler gave ${#hosts[@]} nodes (${hosts[*]}), and the job takes $nodes"
echo "$CLUSTER_ATTEMPT ${hosts[*]}" > "$run/attempt"
touch -- "$run/common.$number"
# shellcheck disable=SC2016
lacks=$(on_each_node bash -c '[ -e "$1" ] || hostname' look "$run/common.$number")
end_if_refused
# shellcheck disable=SC2086
[ -z "$lacks" ] || fail 78 "$run of ${hosts[0]} is not the same folder as on" $lacks
export CLUSTER_HOSTS="${hosts[*]}" PET_MASTER_ADDR="${hosts[0]}"

# The port derives from the job's number, so that jobs on one node differ. A port in use is skipped.
taken() {
    timeout 1 bash -c ": < /dev/tcp/127.0.0.1/$1" 2>/dev/null || [ -n "$(ss -Hltn "sport = :$1" 2>/dev/null)" ]
}
if [ "$port" -gt 0 ]; then
    ! taken "$port" || fail 71 "${hosts[0]}: port $port is taken: choose another: --master-port auto"
else
    port=$((20000 + number % 10000))
    for _ in $(seq 20); do
        taken "$port" || break
        port=$((20000 + (port - 19999) % 10000))
    done
fi
export PET_MASTER_PORT="$port"

# One task on each node runs the node's script. After 75 ("checkpoint written, run me again") the other nodes are not
# killed, because they exit with 75, too. Nor are they during a stop, which writes `grace`: they may still write a
# checkpoint. The trap keeps this shell alive, so that the batch system tracks its children.
# shellcheck disable=SC2016
task='trap : TERM USR2; bash -c "$1" node; code=$?; [ "$code" = 75 ] || [ -e "$2/grace" ] || exit "$code"'
start_nodes bash -c "$task" task "$node" "$out"
stopped=
trap 'signal_nodes USR2' USR2
trap 'stopped=yes; signal_nodes TERM' TERM
wait_for "$step"

# The exit code of the node $1, or `nothing`. Waits $2 s for it.
ended() {
    local code until=$((SECONDS + $2))
    until read -r code _ 2>/dev/null < "$out/node-$1.exit"; do
        [ "$SECONDS" -lt "$until" ] || { echo nothing; return; }
        sleep 0.2
    done
    echo "$code"
}
# Requeue if a node ended as `requeue_after` says. A node without an exit code has not started if the step ended with 0
# or 7x (its script failed before the agent).
again=
for rank in $(seq 0 $((nodes - 1))); do
    ended=$(ended "$rank" 0)
    if [ "$ended" = nothing ] && [ -z "$stopped" ]; then
        case $code in
            0 | 7?) ;;
            *)
                # Wait until the batch system detects a dead node. Before that it would assign the same node again. On a
                # live node the script is still ending: the step does not wait for it after another node's failure.
                if ! answers "${hosts[$rank]}"; then
                    end_if_refused
                    sleep 900
                fi
                ended=$(ended "$rank" 10) ;;
        esac
    fi
    case $ended:$code in
        nothing:0 | nothing:7?) continue ;;
    esac
    case " $requeue_after " in
        *" $ended "*) [ "$ended" = nothing ] && again="nothing from ${hosts[$rank]}" || again=${again:-$ended} ;;
    esac
done
# A job that was cancelled is not requeued.
if [ -n "$again" ] && [ -z "$stopped" ] && [ "$restarts" -lt "$max_restarts" ] && is_wanted; then
    echo "attempt $CLUSTER_ATTEMPT ended with $again: again"
    ! requeue || exit 0
fi
rm -f -- "$run/common.$number"
[ -z "$again" ] || exit 75
exit "$code"
