# shellcheck shell=bash disable=SC2154
# Submits a batch script with the command "$@". Variables: `dir` (the attempt's folder), `folder` (the job's), `path` (that
# of the script), and `secrets`, the number of their lines on stdin (the agent in one line of Base64 and the batch script
# follow). Prints the command's output and writes it to `submitted`. The batch system's common.sh has the functions
# `clear_inherited`, which unsets the variables that the command may not inherit, and `forget_queue FOLDER`, which discards
# what was cached of the queue.
# The secrets are in the job's environment, which the batch system keeps until the job ends, also if it requeues the job. In
# a file on the shared disk they would remain after the job was cancelled or killed.
clear_inherited
mkdir -p -- "$dir" && cd -- "$dir" || exit 1
read_secrets "$secrets" || exit 1
read -r agent && base64 -d <<< "$agent" > "$dir/agent.pyz" || exit 1
cat > "$path" || exit 1
touch -- "$folder/submitted" # the job may start before the command has printed its number
CLUSTER_SUBMITTED=yes "$@" > "$folder/submitted.tmp"
code=$?
cat -- "$folder/submitted.tmp"
mv -- "$folder/submitted.tmp" "$folder/submitted"
forget_queue "$folder"
exit "$code"
