# shellcheck shell=bash disable=SC2154
# Cancels the job `job` with the launch ID `launch`: sends SIGTERM to its batch script, and runs scancel after `grace`
# seconds. scancel also signals the FUSE processes of Apptainer, so that ranks in the container would hang. `folder` is the
# job's ("": not known); the agents read the seconds in the attempt's, so that they wait longer. Its number is in
# `submitted`. While it is not known, and if it belongs to a later job in the same folder, the jobs with the name and the
# launch ID are meant. Prints the jobs that remain.
clear_slurm
chosen() {
    local number
    number=$([ -z "$folder" ] || submitted "$folder")
    if [ -n "$number" ]; then
        has_launch "$launch" "$number"
        [ $? = 1 ] || { echo "$number"; return; }
    fi
    queued "$launch" "$job"
}
# squeue fails for a number that it has forgotten.
left() {
    [ -z "$numbers" ] || squeue --noheader --array --user "$(id -un)" --jobs "$numbers" "$@" --Format JobID:16 2>/dev/null |
        tr -d ' ' | sort -u
}
until_gone() { local until=$((SECONDS + $1)); while [ "$SECONDS" -lt "$until" ] && [ -n "$(left)" ]; do sleep 1; done; }
[ -z "$folder" ] || { read -r attempt _ < "$folder/attempt" && echo "$grace" > "$folder/attempt-$attempt/grace"; } 2>/dev/null
numbers=$(chosen) || { echo "squeue does not answer" >&2; exit 1; }
numbers=$(tr '\n' ',' <<< "$numbers") numbers=${numbers%,}
running=$(left --states running)
# The last task of an array has the number of the whole array.
case $numbers in *_*) running=${running:+$numbers} ;; esac
if [ "$grace" -gt 0 ] && [ -n "$running" ]; then
    # shellcheck disable=SC2086
    scancel --batch --signal=TERM $running && until_gone "$grace"
fi
if [ -n "$(left)" ]; then
    # shellcheck disable=SC2086
    scancel ${numbers//,/ } || exit 1
fi
until_gone 90
[ -z "$folder" ] || ! own=$(own_folder "${folder%/*}/.cache" "$(id -u)" "$folder/submitted") || rm -f -- "$own/squeue"
for number in $(left); do echo "Slurm's job $number"; done
