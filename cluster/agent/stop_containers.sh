# shellcheck shell=bash
# Stops and removes the containers of the job $1 in the engines $3..., with $2 seconds of grace. Prints what stays.
job=$1 grace=$2
shift 2
for engine; do
    command -v "$engine" >/dev/null || continue
    listed() { "$engine" ps -aq --filter "label=CLUSTER_JOB_ID=$job"; }
    left=$(listed)
    # shellcheck disable=SC2086
    [ -z "$left" ] || "$engine" stop -t "$grace" $left >/dev/null 2>&1
    left=$(listed)
    # shellcheck disable=SC2086
    [ -z "$left" ] || "$engine" rm -f $left >/dev/null 2>&1
    # A container that removes itself (--rm) is still listed for a moment.
    for _ in $(seq 20); do left=$(listed); [ -n "$left" ] || break; sleep 0.5; done
    for container in $left; do echo "container $container"; done
done
