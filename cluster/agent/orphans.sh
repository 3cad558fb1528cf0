# shellcheck shell=bash
# Prints a line `KIND JOB ID` for each process, and container of the engines $@, of a job: `script` for a running node script, else `process`
# or `container`. Omits ranks started without a launcher, Slurm jobs, and containers of other users.
# shellcheck disable=SC2013
for file in $(grep -lzs '^CLUSTER_JOB_ID=' /proc/[0-9]*/environ); do
    ! grep -qzs '^SLURM_JOB_ID=' "$file" || continue
    pid=${file#/proc/} pid=${pid%/environ}
    job=$(tr '\0' '\n' < "$file" 2>/dev/null | sed -n 's/^CLUSTER_JOB_ID=//p')
    [ -n "$job" ] || continue # it has ended
    case $(tr '\0' '\n' < "/proc/$pid/cmdline" 2>/dev/null | sed -n '1p;2p' | tr '\n' ' ') in
        "bash "*/attempt-*.sh" ") echo "script $job $pid" ;; # it exports CLUSTER_ATTEMPT itself
        *) ! grep -qzs '^CLUSTER_ATTEMPT=' "$file" || echo "process $job $pid" ;;
    esac
done
for engine; do
    command -v "$engine" >/dev/null || continue
    for container in $(timeout 15 "$engine" ps -aq --filter label=CLUSTER_JOB_ID 2>/dev/null); do
        about='{{index .Config.Labels "CLUSTER_JOB_ID"}} {{index .Config.Labels "com.docker.compose.project"}}'
        about="u{{.Config.User}} $about {{.State.Status}}"
        read -r user job rest <<< "$("$engine" inspect --format "$about" "$container" 2>/dev/null)"
        [ -n "$job" ] || continue # it has been removed
        user=${user#u} user=${user%%:*}
        case ${user:-0} in 0 | "$(id -u)") ;; *) [ "$(id -u)" = 0 ] || continue ;; esac
        # in a container of compose the agent is the command
        case $rest in ?*" running") echo "script $job $container" ;; *) echo "container $job $container" ;; esac
    done
done
