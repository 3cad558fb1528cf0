# shellcheck shell=bash disable=SC2154
# Runs on the login node. Writes a file with `token` in its name into each of the folders `run_dir` and `data_dir`, or its
# closest existing parent, and runs the command "$@" in a Slurm job for `timeout_s` at most, with the paths of the two files
# as further arguments. The end of the input cancels the job.
clear_slurm
marker() {
    local folder=$1
    until [ -d "$folder" ]; do folder=$(dirname -- "$folder"); done
    printf '%s\n' "$folder/.clusterctl-doctor.$token"
}
run_file=$(marker "$run_dir")
data_file=$(marker "$data_dir")
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
