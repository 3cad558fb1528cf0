# shellcheck shell=bash disable=SC2034,SC2154
# Prints the state of the nodes of Slurm jobs, on their login node. Variables: `most` (bytes of a log), `format` (squeue's
# columns), `old` (the maximum age in seconds of squeue's cached output).
#
# The arguments are, for each job, its name, its folder and the number of its nodes, then FOLDER NODE OFFSET for each of these.
# The job's number is in `submitted`. Until it is known, the newest job of this name is meant.
#
# For each job, four lines come before those of its nodes:
# - squeue's line, or an empty one
# - its attempt and hosts
# - the error of squeue
# - the error of the batch script
clear_slurm

# The function of `nodes`. Slurm knows whether a node without an exit code still runs.
state() {
    state=alive
    if first_line "$1/$2.exit"; then state="exit $line"; fi
}

# Opens the cache of squeue's output. It is in the run directory, because everybody has /tmp of a login node. Without a
# folder of this user there, it lasts only for this script.
folder=$2
if own=$(own_folder "${folder%/*}/.cache" "$(id -u)" "$folder/submitted"); then
    cache="$own/squeue"
else
    cache=$(mktemp -d)/squeue && trap 'rm -rf -- "${cache%/*}"' EXIT
fi
refresh() {
    local list=(squeue --noheader --user "$(id -un)" --array --states all --Format "$format")
    if timeout 15 "${list[@]}" > "$cache.new" 2> "$cache.err"; then
        mv -- "$cache.new" "$cache"
    else
        touch -- "$cache" # the next poll keeps the last answer, too
    fi
}
exec 9>> "$cache.lock"
flock -w 20 9
written=$(stat -c %Y "$cache" 2>/dev/null || echo 0)
if [ $(($(date +%s) - written)) -ge "$old" ]; then refresh; fi
exec 9>&-

# Prints squeue's line of the job $1 with the number $2 ("": not known yet).
queue_line() {
    case $2 in
        *_*)
            awk -v array="${2%_*}" -v task="${2#*_}" \
                'substr($0, 67, 16) + 0 == array && substr($0, 83, 12) + 0 == task && substr($0, 83, 1) != "N"' "$cache" ;;
        ?*) awk -v number="$2" 'substr($0, 51, 16) + 0 == number' "$cache" | tail -n 1 ;;
        *) grep -e "^$1 " "$cache" 2>/dev/null | sort -k 2,2n | tail -n 1 ;;
    esac
}
# Prints the error of the batch script in the folder $1, whose attempt's is $2. Pyxis prints enroot's log before it says that
# the container could not be started.
script_error() {
    local newest pattern
    local patterns=('^error: ' '^s(run|batch): fatal: ' '^sbatch: error: '
        'error: pyxis: +\[ERROR\]' 'error: pyxis: (failed|could)' '^srun: error: .*Exited with exit code')
    # srun's other messages matter until it has started a node.
    compgen -G "$2/node-*.pid" > /dev/null || patterns+=('^srun: ')
    # The newest lines come first, back to the start of the attempt.
    newest=$({ end_of "$1/slurm.log" | tail -n 1000; end_of "$2/srun.err"; } | tac | sed '/^attempt [0-9]* is job /q')
    for pattern in "${patterns[@]}"; do
        grep -m 1 -E "$pattern" <<< "$newest" && break
    done
}
# Prints the four lines of the job $1. $2 is its folder, and $3 its attempt's.
about() {
    local job=$1 folder=$2
    printf '%s\n' "$(queue_line "$job" "$(submitted "$folder")")"
    first_line "$folder/attempt"
    printf '%s\n' "$line"
    printf '%s\n' "$(head -n 1 "$cache.err" 2>/dev/null)"
    printf '%s\n' "$(script_error "$folder" "$3")"
}
while [ $# -gt 0 ]; do
    about "$1" "$2" "$4"
    words=$((3 * $3))
    shift 3
    nodes "${@:1:words}"
    shift "$words"
done
