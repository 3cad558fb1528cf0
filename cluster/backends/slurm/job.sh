# shellcheck shell=bash disable=SC2154
# The body of a batch script: chooses the master and its port, starts the nodes, and requeues the job. Above it,
# __init__.py writes `run` (the job's folder), `nodes`, `port`, `max_restarts`, `first_attempt`, `requeue_after` (the
# ends of a node after which the job is requeued: exit codes, or `nothing`), `options` (the variables in which srun finds
# the job's options) and `node` (the script of a node), and then environment.sh.
set -u
# sbatch passes on the variables of its own shell, which may belong to another job. Only those that describe this job's
# allocation and options stay.
clear_slurm 'SLURM_JOB_*' SLURM_JOBID 'SLURM_ARRAY_*' SLURM_RESTART_COUNT SLURM_NNODES SLURM_NODELIST SLURM_NODE_ALIASES \
    SLURM_TASKS_PER_NODE 'SLURM_*_ON_NODE' SLURM_NODEID 'SLURM_SUBMIT_*' 'SLURM_TOPOLOGY_*' SLURMD_NODENAME \
    SLURM_CLUSTER_NAME SLURM_WORKING_CLUSTER 'SLURM_SPANK_*' '_SLURM_SPANK_*' "${options[@]:-}"
restarts=$((${CLUSTER_RESTARTS:-0} + ${SLURM_RESTART_COUNT:-0}))
export CLUSTER_ATTEMPT=$((first_attempt + restarts))
out="$run/attempt-$CLUSTER_ATTEMPT"
echo "attempt $CLUSTER_ATTEMPT is job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"
fail() {
    local code=$1
    shift
    printf 'error: %s\n' "$*" >&2
    exit "$code"
}

# The first node that Slurm assigned is the master. Exit code 78: the nodes do not share the run directory.
[ "$restarts" -le "$max_restarts" ] || fail 75 "it was restarted $max_restarts times (--max-restarts)"
[ -z "${CLUSTER_SUBMITTED:-}" ] || [ -e "$run/submitted" ] || fail 78 "$(hostname): there is no $run"
mkdir -p -- "$out" || fail 78 "$(hostname): cannot make $out"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[ "${#hosts[@]}" = "$nodes" ] || fail 71 "Slurm gave ${#hosts[@]} nodes (${hosts[*]}), and the job takes $nodes"
echo "$CLUSTER_ATTEMPT ${hosts[*]}" > "$run/attempt"
touch -- "$run/common.$SLURM_JOB_ID"
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
each=(--nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1)
# Ends the job if srun has refused a step in $out/srun.err, because it would refuse the next one, too.
end_if_refused() {
    cat -- "$out/srun.err" >&2
    ! grep -qE '^srun: (fatal: |error: Unable to create step )' "$out/srun.err" || exit 71
}
# shellcheck disable=SC2016
lacks=$(srun "${each[@]}" bash -c '[ -e "$1" ] || hostname' look "$run/common.$SLURM_JOB_ID" 2> "$out/srun.err")
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
    port=$((20000 + SLURM_JOB_ID % 10000))
    for _ in $(seq 20); do
        taken "$port" || break
        port=$((20000 + (port - 19999) % 10000))
    done
fi
export PET_MASTER_PORT="$port"

# One task on each node runs the node's script. After 75 ("checkpoint written, run me again") the other nodes are not
# killed, because they exit with 75, too. Nor are they during a stop, which writes `grace`: they may still write a
# checkpoint. The trap keeps this shell alive, so that Slurm tracks its children.
# shellcheck disable=SC2016
task='trap : TERM USR2; bash -c "$1" node; code=$?; [ "$code" = 75 ] || [ -e "$2/grace" ] || exit "$code"'
# shellcheck disable=SC2317,SC2329
signal_nodes() {
    # shellcheck disable=SC2016
    local text='read -r pid < "$1/node-$SLURM_NODEID.pid" && kill -s "$2" "$pid"'
    srun --overlap "${each[@]}" bash -c "$text" signal "$out" "$1"
}
srun "${each[@]}" --kill-on-bad-exit=1 bash -c "$task" task "$node" "$out" &
srun=$!
stopped=
trap 'signal_nodes USR2' USR2
trap 'stopped=yes; signal_nodes TERM' TERM
wait "$srun"
code=$?
while kill -0 "$srun" 2>/dev/null; do # a signal ends `wait` before srun exits
    wait "$srun"
    code=$?
done
wait "$srun" 2>/dev/null # again, if both happened at once: 127 means that the code is known
last=$?
[ "$last" = 127 ] || code=$last

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
                # Wait until Slurm detects a dead node. Before that it would assign the same node again. On a live node the
                # script is still ending: srun does not wait for it after another node's failure.
                if ! timeout 30 srun --overlap --nodes=1 --ntasks=1 --nodelist="${hosts[$rank]}" true 2> "$out/srun.err"; then
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
# The last task of an array has the number of the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
state=$(scontrol show job "$job" --oneliner | grep -o 'JobState=[A-Z_]*')
if [ -n "$again" ] && [ -z "$stopped" ] && [ "$restarts" -lt "$max_restarts" ] && [ "$state" = JobState=RUNNING ]; then
    echo "attempt $CLUSTER_ATTEMPT ended with $again: again"
    ! scontrol requeue "$job" || { sleep 600; exit 75; } # Slurm ends this script in a moment
    echo "Slurm does not requeue it: a new job"
    # The new job counts from 0. With --export=NONE in the script, the variable would not reach it.
    (clear_slurm && CLUSTER_RESTARTS=$((restarts + 1)) sbatch --export=ALL "$0" > "$run/submitted") && exit 0
fi
rm -f -- "$run/common.$SLURM_JOB_ID"
[ -z "$again" ] || exit 75
exit "$code"
