# shellcheck shell=bash disable=SC2154
# Submits a batch script with the command "$@". Variables: `dir` (the attempt's folder), `folder` (the job's), and `secrets`,
# the number of their lines on stdin (the agent in one line of Base64 and the batch script follow). Prints the command's
# output and writes it to `submitted`.
# The secrets are in the job's environment, which Slurm keeps until the job ends, also if it requeues the job. In a file
# on the shared disk they would remain after scancel or SIGKILL.
clear_slurm
mkdir -p -- "$dir" && cd -- "$dir" || exit 1
read_secrets "$secrets" || exit 1
read -r agent && base64 -d <<< "$agent" > "$dir/agent.pyz" || exit 1
cat > "$dir/job.sbatch" || exit 1
touch -- "$folder/submitted" # the job may start before sbatch has printed its number
CLUSTER_SUBMITTED=yes "$@" > "$folder/submitted.tmp"
code=$?
cat -- "$folder/submitted.tmp"
mv -- "$folder/submitted.tmp" "$folder/submitted"
# The cached output of squeue does not contain the job.
if own=$(own_folder "${folder%/*}/.cache" "$(id -u)" "$folder/submitted"); then
    exec 9>> "$own/squeue.lock"
    flock -w 20 9
    rm -f -- "$own/squeue"
fi
exit "$code"
