# shellcheck shell=bash
# slurm_job.sh RUN_DIR DATA_DIR TOKEN TIMEOUT_S COMMAND...
# Runs on the login node. Writes a file into each of the two folders, or its closest existing parent, and runs a command in
# a Slurm job with the paths of the two files as further arguments. The end of the input cancels the job.
clear_slurm
token=$3 timeout_s=$4
marker() {
    local folder=$1
    until [ -d "$folder" ]; do folder=$(dirname -- "$folder"); done
    printf '%s\n' "$folder/.clusterctl-doctor.$token"
}
run_file=$(marker "$1")
data_file=$(marker "$2")
shift 4
trap 'rm -f -- "$run_file" "$data_file"' EXIT
touch -- "$run_file" "$data_file"

# Only the watcher reads the input.
exec 3<&0
timeout -k 10 "$timeout_s" "$@" "$run_file" "$data_file" 2>&1 < /dev/null 3<&- &
job=$!
{
    read -r _
    kill "$job"
} <&3 > /dev/null 2>&1 &
wait "$job"
kill "$!" 2>/dev/null
exit 0
