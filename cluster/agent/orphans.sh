# shellcheck shell=bash disable=SC2154
# Prints what jobs of the backend `backend` have on this machine: a line `user ID` with the user that asks, then a line
# `KIND LAUNCH-ID JOB USER` for each process, and each container of the engines $@: `script` for a running node script, else
# `process` or `container`; and a line `silent ENGINE` for an engine that does not answer. Things of another backend belong
# to a queue or a cluster, which alone knows whether they run. Omits ranks started without a launcher.
echo "user $(id -u)"
# Prints a line for the kind $1 with the launch ID $2, the job $3 and the user $4. A job may set any variable.
found() {
    [[ $2 =~ ^[0-9a-f]{16}$ && $3 =~ ^[a-z0-9][a-z0-9-]{0,47}$ && $4 =~ ^[0-9]*$ ]] || return 0
    printf '%s %s %s %s\n' "$1" "$2" "$3" "${4:--}"
}
for pid in $(having "CLUSTER_BACKEND=$backend"); do
    launch='' job='' attempt='' kind=process
    while IFS= read -r -d '' variable; do
        case $variable in
            CLUSTER_LAUNCH_ID=*) launch=${variable#*=} ;;
            CLUSTER_JOB_ID=*) job=${variable#*=} ;;
            CLUSTER_ATTEMPT=*) attempt=${variable#*=} ;;
        esac
    done 2>/dev/null < "/proc/$pid/environ"
    case $(tr '\0' '\n' < "/proc/$pid/cmdline" 2>/dev/null | sed -n '1p;2p' | tr '\n' ' ') in
        "bash "*/attempt-*.sh" ") kind=script ;; # it exports CLUSTER_ATTEMPT itself
        *) [ -n "$attempt" ] || continue ;;
    esac
    found "$kind" "$launch" "$job" "$(user_of "$pid")"
done
for engine; do
    command -v "$engine" >/dev/null || continue
    containers=$(timeout 15 "$engine" ps -aq --filter "label=CLUSTER_BACKEND=$backend" 2>/dev/null) || echo "silent $engine"
    for container in $containers; do
        about='{{.State.Status}} {{index .Config.Labels "com.docker.compose.project"}}'
        about+='|{{index .Config.Labels "CLUSTER_LAUNCH_ID"}}|{{index .Config.Labels "CLUSTER_JOB_ID"}}'
        about+='|{{index .Config.Labels "CLUSTER_UID"}}'
        IFS='|' read -r state launch job user <<< "$("$engine" inspect --format "$about" "$container" 2>/dev/null)"
        # in a container of compose the agent is the command
        case $state in "running "?*) kind=script ;; *) kind=container ;; esac
        found "$kind" "$launch" "$job" "$user"
    done
done
