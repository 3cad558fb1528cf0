# shellcheck shell=bash disable=SC2154
# Cancels the job `job` with the launch ID `launch`: sends SIGTERM to its batch script, and cancels it after `grace` seconds.
# `folder` is the job's ("": not known); the agents read the seconds in the attempt's, so that they wait longer. Its number
# is in `submitted`. While it is not known, and if it belongs to a later job in the same folder, the jobs with the name and
# the launch ID are meant. Prints the jobs that remain, with the batch system's name `scheduler`; `lister` shows its queue.
# The batch system's common.sh has, besides the functions of submit.sh:
#
# submitted FOLDER          prints the number of the folder's job, or nothing if it is not known yet
# has_launch ID NUMBER      whether a job has a launch ID; 2 if that cannot be read, because it has ended
# queued ID NAME            prints the numbers of this user's jobs in the queue with a launch ID and a name, or fails
# remaining NUMBER...       prints the numbers of those jobs that are in the queue or run
# running NUMBER...         prints those that run, as `terminate` takes them
# terminate NUMBER...       sends SIGTERM to the batch scripts
# cancel NUMBER...          cancels jobs
clear_inherited
chosen() {
    local number
    number=$([ -z "$folder" ] || submitted "$folder")
    if [ -n "$number" ]; then
        has_launch "$launch" "$number"
        [ $? = 1 ] || { echo "$number"; return; }
    fi
    queued "$launch" "$job"
}
left() { [ ${#numbers[@]} = 0 ] || remaining "${numbers[@]}"; }
until_gone() { local until=$((SECONDS + $1)); while [ "$SECONDS" -lt "$until" ] && [ -n "$(left)" ]; do sleep 1; done; }

[ -z "$folder" ] || { read -r attempt _ < "$folder/attempt" && echo "$grace" > "$folder/attempt-$attempt/grace"; } 2>/dev/null
lines=$(chosen) || { echo "$lister does not answer" >&2; exit 1; }
read -r -a numbers <<< "${lines//$'\n'/ }"
if [ "$grace" -gt 0 ] && [ ${#numbers[@]} -gt 0 ]; then
    lines=$(running "${numbers[@]}")
    read -r -a started <<< "${lines//$'\n'/ }"
    [ ${#started[@]} = 0 ] || { terminate "${started[@]}" && until_gone "$grace"; }
fi
[ -z "$(left)" ] || cancel "${numbers[@]}" || exit 1
until_gone 90
[ -z "$folder" ] || forget_queue "$folder"
for number in $(left); do echo "$scheduler's job $number"; done
