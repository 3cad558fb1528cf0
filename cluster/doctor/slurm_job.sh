# shellcheck shell=bash
# Runs a command in a Slurm job, from the login node, and tests whether its nodes share two folders. Prints the command's
# output, then `srun=CODE`, then `back=RANK run_dir` and `back=RANK data_dir` for each node whose file can be read here. $1 a
# token of this run, $2 the run directory, $3 the data directory, $4 the number of nodes, $5 the timeout in seconds, then the
# command. The job is cancelled when the input ends.
token=$1 run_dir=$2 data_dir=$3 nodes=$4 timeout_s=$5
shift 5
trap 'rm -f -- "$run_dir/.clusterctl-doctor.$token"* "$data_dir/.clusterctl-doctor.$token"*' EXIT
for folder in "$run_dir" "$data_dir"; do echo "$token" 2>/dev/null > "$folder/.clusterctl-doctor.$token"; done

# The watcher reads the input, and the command does not.
exec 3<&0
timeout -k 10 "$timeout_s" "$@" 2>&1 < /dev/null 3<&- &
job=$!
{
    read -r _
    kill "$job"
} <&3 > /dev/null 2>&1 &
wait "$job"
echo "srun=$?"
kill "$!" 2>/dev/null

# Each node writes a name of its own. A network file system has no cached lookup of a name that is new.
for rank in $(seq 0 $((nodes - 1))); do
    [ "$(cat "$run_dir/.clusterctl-doctor.$token.$rank" 2>/dev/null)" != "$token" ] || echo "back=$rank run_dir"
    [ "$(cat "$data_dir/.clusterctl-doctor.$token.$rank" 2>/dev/null)" != "$token" ] || echo "back=$rank data_dir"
done
exit 0
