# shellcheck shell=bash
# Stops the job $1 on this machine: its processes, then its containers in the engines $4... Processes get SIGTERM, which
# the agents forward to their ranks, and SIGKILL after $2 seconds. The agents read the seconds in the attempt's folder $3
# ("": none), so that they wait longer. Prints what remains: `process PID`, `container ID`.
job=$1 grace=$2 folder=$3
shift 3
# In a shell of its own: a limit of the file size would end it.
[ ! -d "$folder" ] || (echo "$grace" > "$folder/grace") 2>/dev/null
for pid in $(pids "$job"); do
    grep -qzs '^LOCAL_RANK=' "/proc/$pid/environ" || kill -TERM "$pid" 2>/dev/null
done
until=$(($(milliseconds) + 1000 * grace)) # a loop of so many sleeps would take longer
while [ "$(milliseconds)" -lt "$until" ] && [ -n "$(pids "$job")" ]; do sleep 0.1; done
for _ in 1 2 3 4 5; do
    left=$(pids "$job")
    [ -n "$left" ] || break
    # shellcheck disable=SC2086
    kill -KILL $left 2>/dev/null
    sleep 0.2
done
for pid in $left; do echo "process $pid"; done
for engine; do
    command -v "$engine" >/dev/null || continue
    listed() { "$engine" ps -aq --filter "label=CLUSTER_JOB_ID=$job"; }
    left=$(listed)
    # shellcheck disable=SC2086
    [ -z "$left" ] || "$engine" stop -t $((grace > SECONDS ? grace - SECONDS : 0)) $left >/dev/null 2>&1
    left=$(listed)
    # shellcheck disable=SC2086
    [ -z "$left" ] || "$engine" rm -f $left >/dev/null 2>&1
    # A container that removes itself (--rm) is still listed for a moment.
    for _ in $(seq 20); do left=$(listed); [ -n "$left" ] || break; sleep 0.5; done
    for container in $left; do echo "container $container"; done
done
