# shellcheck shell=bash disable=SC2154
# Stops the job with the launch ID `launch` on this machine: its processes, then its containers in `engines` (an array), of the attempt `attempt`
# or ("") of all. Processes get SIGTERM, which the agents forward to their ranks, and SIGKILL after `grace` seconds. The
# agents read the seconds in the attempt's folder `folder` ("": none), so that they wait longer. Removes the temporary folders
# of agents that were killed. Prints what remains: `process PID`, `container ID`.
running() {
    local pid
    for pid in $(having "CLUSTER_LAUNCH_ID=$launch"); do
        [ -n "$attempt" ] && ! grep -qzxs "CLUSTER_ATTEMPT=$attempt" "/proc/$pid/environ" || echo "$pid"
    done
}
# Whether the parent of the process $1 is not among the processes $left, because it has exited.
is_orphan() {
    local stat parent
    read -r stat < "/proc/$1/stat" || return 1
    read -r _ parent _ <<< "${stat##*) }"
    [[ " ${left//$'\n'/ } " != *" $parent "* ]]
} 2>/dev/null
# Sends SIGTERM to the process $1, unless it is a rank or one of a rank's.
terminate() {
    asked+=" $1 "
    grep -qzs '^LOCAL_RANK=' "/proc/$1/environ" || kill -TERM "$1" 2>/dev/null
}
# In a separate shell: a limit of the file size would end it.
[ ! -d "$folder" ] || (echo "$grace" > "$folder/grace") 2>/dev/null
asked=
for pid in $(running); do terminate "$pid"; done
until=$(($(milliseconds) + 1000 * grace)) # a loop of so many sleeps would take longer
while [ "$(milliseconds)" -lt "$until" ]; do
    left=$(running)
    [ -n "$left" ] || break
    # A script may have started the agent after the list was made, and then been killed before it could forward the signal.
    for pid in $left; do [[ $asked == *" $pid "* ]] || ! is_orphan "$pid" || terminate "$pid"; done
    sleep 0.1
done
for _ in 1 2 3 4 5; do
    left=$(running)
    [ -n "$left" ] || break
    # shellcheck disable=SC2086
    kill -KILL $left 2>/dev/null
    sleep 0.2
done
for pid in $left; do echo "process $pid"; done
[ -n "$left" ] || rm -rf "${TMPDIR:-/tmp}/clusterctl-$launch-${attempt:+$attempt-}"* # of agents that were killed
for engine in "${engines[@]}"; do
    command -v "$engine" >/dev/null || continue
    listed() {
        local container
        for container in $("$engine" ps -aq --filter "label=CLUSTER_LAUNCH_ID=$launch"); do
            [ -n "$attempt" ] && ! of_attempt "$container" || echo "$container"
        done
    }
    of_attempt() {
        "$engine" inspect --format '{{range .Config.Env}}{{println .}}{{end}}' "$1" | grep -qx "CLUSTER_ATTEMPT=$attempt"
    }
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
