# shellcheck shell=bash
# Submits a batch script. $1 the attempt's folder, $2 the job's folder, $3 lines of secrets on stdin (the agent in one line of
# Base64 and the batch script follow), then the command that submits. Prints its output and writes it to `submitted`.
clear_slurm
dir=$1 folder=$2 secrets=$3
shift 3
mkdir -p -- "$dir" && cd -- "$dir" || exit 1
if [ "$secrets" -gt 0 ]; then
    (umask 077; mapfile -n "$secrets" text && printf %s "${text[@]}" > "$folder/secrets") || exit 1
fi
read -r agent && base64 -d <<< "$agent" > "$dir/agent.pyz" || exit 1
cat > "$dir/job.sbatch" || exit 1
touch -- "$folder/submitted" # the job may start before sbatch has printed its number
CLUSTER_SUBMITTED=yes "$@" > "$folder/submitted.tmp"
code=$?
cat -- "$folder/submitted.tmp"
mv -- "$folder/submitted.tmp" "$folder/submitted"
[ "$code" = 0 ] || rm -f -- "$folder/secrets"
# The cached output of squeue does not contain the job.
exec 9>> "${folder%/*}/.squeue.lock"
flock -w 20 9
rm -f -- "${folder%/*}/.squeue"
exit "$code"
