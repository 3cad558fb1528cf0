# shellcheck shell=bash disable=SC2034
# The state of a Slurm job's nodes, from its login node. $1 the job, $2 how much of a log at once, $3 columns of squeue, $4 the
# job's folder, $5 how old in seconds squeue's answer may be (one call serves all jobs), then FOLDER NODE OFFSET for each node.
# Before the nodes' lines: squeue's line of the job, the attempt that runs and its hosts, what keeps squeue from answering, the
# batch script's error.
job=$1 most=$2 format=$3 folder=$4 old=$5
shift 5

state() { if [ -f "$1/$2.exit" ]; then echo "exit $(cat "$1/$2.exit")"; else echo alive; fi; }
cache="${folder%/*}/.squeue" # in the run directory: everybody has /tmp of a login node
exec 9>> "$cache.lock"
flock -w 20 9
if [ $(($(date +%s) - $(stat -c %Y "$cache" 2>/dev/null || echo 0))) -ge "$old" ]; then
    if timeout 15 squeue --noheader --user "$(id -un)" --states all --Format "$format" > "$cache.new" 2> "$cache.err"
    then mv -- "$cache.new" "$cache"
    else touch -- "$cache"; fi
fi
exec 9>&-
grep -e "^$job " "$cache" 2>/dev/null | sort -k 2,2n | tail -n 1 | tr -d '\n'; echo
head -n 1 "$folder/attempt" 2>/dev/null || echo
head -n 1 "$cache.err" 2>/dev/null | tr -d '\n'; echo
grep '^error: ' "$folder/slurm.log" 2>/dev/null | tail -n 1 | tr -d '\n'; echo
nodes "$@"
