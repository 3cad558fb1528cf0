# shellcheck shell=bash
# Functions of the scripts that the launcher runs on the login node of a Slurm cluster. check.sh, submit.sh and
# cancel.sh of backends/batch list those that they call.

clear_inherited() { clear_slurm; }
report_inherited() { report_slurm; }
describe_site() {
    timeout 20 sinfo --noheader --format 'partition %P|%D|%c|%G|%l' 2>&1 || return 1
    ! timeout 20 scontrol show config 2>/dev/null | grep -q '^AccountingStoreFlags.*job_env' || echo stores_env
}
named() { squeue --noheader --user "$(id -un)" --name "$1" --Format JobID:16; }

# 123, or 123_4 for a task of an array. job.sh renews it when it submits the job again.
submitted() { sed -n 's/^Submitted batch job \([0-9]*\).*/\1/p; s/^[0-9]*_[0-9]*$/&/p' "$1/submitted" 2>/dev/null | tail -n 1; }

has_launch() {
    local text
    text=$(timeout 20 scontrol write batch_script "${2%_*}" - 2>/dev/null)
    [[ $text == '#!'* ]] || return 2 # scontrol exits with 0 even if there is no such job
    [[ $text == *"$1"* ]]
}

# Also the numbers of arrays that have such a job.
queued() {
    local number numbers
    numbers=$(timeout 20 squeue --noheader --user "$(id -un)" --name "$2,${2%-*}" --Format JobID:16) || return 1
    sort -u <<< "$numbers" | while read -r number; do ! has_launch "$1" "$number" < /dev/null || echo "$number"; done
}

# Prints which of the jobs $1 (1,2,...) squeue lists with the further options. squeue fails for a number
# that it has forgotten.
listed() {
    local numbers=$1
    shift
    squeue --noheader --array --user "$(id -un)" --jobs "$numbers" "$@" --Format JobID:16 2>/dev/null | tr -d ' ' | sort -u
}
joined() { local IFS=,; echo "$*"; }
remaining() { listed "$(joined "$@")"; }
running() {
    local numbers
    numbers=$(listed "$(joined "$@")" --states running)
    # The last task of an array has the number of the whole array.
    case $*:$numbers in
        *_*:?*) printf '%s\n' "$@" ;;
        *) echo "$numbers" ;;
    esac
}
# scancel also signals the FUSE processes of Apptainer, so that ranks in the container would hang.
terminate() { scancel --batch --signal=TERM "$@"; }
cancel() { scancel "$@"; }

# Discards the cached output of squeue, which does not have a new job of the folder $1.
forget_queue() {
    local own
    own=$(own_folder "${1%/*}/.cache" "$(id -u)" "$1/submitted") || return 0
    exec 9>> "$own/squeue.lock"
    flock -w 20 9
    rm -f -- "$own/squeue"
    exec 9>&-
}
