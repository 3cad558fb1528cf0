# shellcheck shell=bash disable=SC2034,SC2154
# Prints the state of the nodes of Slurm jobs, on their login node. Variables: `most` (bytes of a log), `format` (squeue's
# columns), `old` (the maximum age in seconds of squeue's cached output). The arguments are, for each job, its name, its folder
# and the number of its nodes, then FOLDER NODE OFFSET for each of these. Four lines come first for each job: squeue's line, or
# empty; attempt and hosts; squeue's error; the batch script's error.
# The job's number is in `submitted`. Until it is known, the newest job of this name is meant.
clear_slurm

state() { if first_line "$1/$2.exit"; then state="exit $line"; else state=alive; fi; }
folder=$2
# In the run directory, because everybody has /tmp of a login node. Without a folder of this user there is no cache.
if own=$(own_folder "${folder%/*}/.cache" "$(id -u)" "$folder/submitted"); then cache="$own/squeue"
else cache=$(mktemp -d)/squeue && trap 'rm -rf -- "${cache%/*}"' EXIT; fi
exec 9>> "$cache.lock"
flock -w 20 9
if [ $(($(date +%s) - $(stat -c %Y "$cache" 2>/dev/null || echo 0))) -ge "$old" ]; then
    if timeout 15 squeue --noheader --user "$(id -un)" --array --states all --Format "$format" > "$cache.new" 2> "$cache.err"
    then mv -- "$cache.new" "$cache"
    else touch -- "$cache"; fi
fi
exec 9>&-
# Prints the four lines of the job $1. $2 is its folder, and $3 its attempt's.
about() {
    local job=$1 folder=$2 number said first error
    number=$(submitted "$folder")
    case $number in
        *_*) line=$(awk -v array="${number%_*}" -v task="${number#*_}" \
            'substr($0, 67, 16) + 0 == array && substr($0, 83, 12) + 0 == task && substr($0, 83, 1) != "N"' "$cache") ;;
        ?*) line=$(awk -v number="$number" 'substr($0, 51, 16) + 0 == number' "$cache" | tail -n 1) ;;
        *) line=$(grep -e "^$job " "$cache" 2>/dev/null | sort -k 2,2n | tail -n 1) ;;
    esac
    echo "$line"
    first_line "$folder/attempt"
    printf '%s\n' "$line"
    head -n 1 "$cache.err" 2>/dev/null | tr -d '\n'; echo
    # The newest lines come first, back to the start of the attempt. srun's other messages matter until it has started a node.
    said=$({ end_of "$folder/slurm.log" | tail -n 1000; end_of "$3/srun.err"; } | tac | sed '/^attempt [0-9]* is job /q')
    first=
    compgen -G "$3/node-*.pid" > /dev/null || first='^srun: '
    # Pyxis prints enroot's log before it says that the container could not be started.
    for error in '^error: ' '^s(run|batch): fatal: ' '^sbatch: error: ' 'error: pyxis: +\[ERROR\]' 'error: pyxis: (failed|could)' \
        '^srun: error: .*Exited with exit code' $first; do
        grep -m 1 -E "$error" <<< "$said" && break
    done | tr -d '\n'; echo
}
while [ $# -gt 0 ]; do
    about "$1" "$2" "$4"
    words=$((3 * $3))
    shift 3
    nodes "${@:1:words}"
    shift "$words"
done
