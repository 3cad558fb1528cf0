# shellcheck shell=bash disable=SC2154
# Cancels the job `job`: sends SIGTERM to its batch script, and runs scancel after `grace` seconds. scancel also signals the
# FUSE processes of Apptainer, so that ranks in the container would hang. `folder` is the job's; the agents read the seconds
# in the attempt's, so that they wait longer. A task of an array has its number in `submitted`, another job is found by name.
# Prints the jobs that remain.
clear_slurm
task=$(grep -oE '[0-9]+_[0-9]+$' "$folder/submitted" 2>/dev/null)
if [ -n "$task" ]; then chosen=(--jobs "$task"); else chosen=(--name "$job"); fi
left() { squeue --noheader --array --user "$(id -un)" "${chosen[@]}" "$@" --Format JobID:16 2>/dev/null | tr -d ' ' | sort -u; }
until_gone() { local until=$((SECONDS + $1)); while [ "$SECONDS" -lt "$until" ] && [ -n "$(left)" ]; do sleep 1; done; }
read -r attempt _ 2>/dev/null < "$folder/attempt" && (echo "$grace" > "$folder/attempt-$attempt/grace") 2>/dev/null
running=$(left --states running)
# The last task of an array has the number of the whole array.
[ -z "$task" ] || running=${running:+$task}
if [ "$grace" -gt 0 ] && [ -n "$running" ]; then
    # shellcheck disable=SC2086
    scancel --batch --signal=TERM $running && until_gone "$grace"
fi
if [ -n "$(left)" ]; then
    if [ -n "$task" ]; then scancel "$task"; else scancel --user "$(id -un)" --name "$job"; fi || exit 1
fi
until_gone 90
! own=$(own_folder "${folder%/*}/.cache" "$(id -u)" "$folder/submitted") || rm -f -- "$own/squeue"
for number in $(left); do echo "Slurm's job $number"; done
