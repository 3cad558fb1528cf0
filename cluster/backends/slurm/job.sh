# shellcheck shell=bash disable=SC2034,SC2154
# A batch job in Slurm's words: what batch/job.sh, which follows, expects of a batch system. Above it are `options` (the
# variables in which srun finds the job's options), the variables of batch/job.sh, and environment.sh.
set -u
# sbatch passes on the variables of its own shell, which may belong to another job. Only those that describe this job's
# allocation and options stay.
clear_slurm 'SLURM_JOB_*' SLURM_JOBID 'SLURM_ARRAY_*' SLURM_RESTART_COUNT SLURM_NNODES SLURM_NODELIST SLURM_NODE_ALIASES \
    SLURM_TASKS_PER_NODE 'SLURM_*_ON_NODE' SLURM_NODEID 'SLURM_SUBMIT_*' 'SLURM_TOPOLOGY_*' SLURMD_NODENAME \
    SLURM_CLUSTER_NAME SLURM_WORKING_CLUSTER 'SLURM_SPANK_*' '_SLURM_SPANK_*' "${options[@]:-}"
scheduler=Slurm number=$SLURM_JOB_ID assigned=$SLURM_JOB_NODELIST requeues=${SLURM_RESTART_COUNT:-0}
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
each=(--nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1)

assigned_hosts() { scontrol show hostnames "$SLURM_JOB_NODELIST"; }
on_each_node() { srun "${each[@]}" "$@" 2> "$out/srun.err"; }
# srun refuses the next step, too.
end_if_refused() {
    cat -- "$out/srun.err" >&2
    ! grep -qE '^srun: (fatal: |error: Unable to create step )' "$out/srun.err" || exit 71
}
start_nodes() {
    srun "${each[@]}" --kill-on-bad-exit=1 "$@" &
    step=$!
}
signal_nodes() {
    # shellcheck disable=SC2016
    local text='read -r pid < "$1/node-$SLURM_NODEID.pid" && kill -s "$2" "$pid"'
    srun --overlap "${each[@]}" bash -c "$text" signal "$out" "$1"
}
answers() { timeout 30 srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" true 2> "$out/srun.err"; }

# The last task of an array has the number of the whole array.
task_number=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
task_number=${task_number:-$SLURM_JOB_ID}
is_wanted() {
    local state
    state=$(scontrol show job "$task_number" --oneliner | grep -o 'JobState=[A-Z_]*')
    [ "$state" = JobState=RUNNING ]
}
requeue() {
    ! scontrol requeue "$task_number" || { sleep 600; exit 75; } # Slurm ends this script in a moment
    echo "Slurm does not requeue it: a new job"
    # The new job counts from 0. With --export=NONE in the script, the variable would not reach it.
    (clear_slurm && CLUSTER_RESTARTS=$((restarts + 1)) sbatch --export=ALL "$0" > "$run/submitted")
}
