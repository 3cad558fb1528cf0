# shellcheck shell=bash
# Functions of the scripts that the launcher runs on the login node of a Slurm cluster.

# The number of the Slurm job of the folder $1: 123, 123_4 for a task of an array, or nothing if it is not known yet.
# job.sh renews it when it submits the job again.
submitted() { sed -n 's/^Submitted batch job \([0-9]*\).*/\1/p; s/^[0-9]*_[0-9]*$/&/p' "$1/submitted" 2>/dev/null | tail -n 1; }

# Whether the batch script of the Slurm job $2 has the launch ID $1; 2 if that cannot be read, because the job has ended.
has_launch() {
    local text
    text=$(timeout 20 scontrol write batch_script "${2%_*}" - 2>/dev/null)
    [[ $text == '#!'* ]] || return 2 # scontrol exits with 0 even if there is no such job
    [[ $text == *"$1"* ]]
}

# The numbers of this user's jobs in Slurm's queue that have the launch ID $1 and the name $2, or are an array with such a
# job. Fails if the queue does not answer.
queued() {
    local number numbers
    numbers=$(timeout 20 squeue --noheader --user "$(id -un)" --name "$2,${2%-*}" --Format JobID:16) || return 1
    sort -u <<< "$numbers" | while read -r number; do ! has_launch "$1" "$number" < /dev/null || echo "$number"; done
}

# The functions of batch/submit.sh.
clear_inherited() { clear_slurm; }
# Discards the cached output of squeue, which does not have a new job of the folder $1.
forget_queue() {
    local own
    own=$(own_folder "${1%/*}/.cache" "$(id -u)" "$1/submitted") || return 0
    exec 9>> "$own/squeue.lock"
    flock -w 20 9
    rm -f -- "$own/squeue"
    exec 9>&-
}
