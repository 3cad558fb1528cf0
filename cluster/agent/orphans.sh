# shellcheck shell=bash
# What runs here for jobs, a line `KIND JOB WHAT` each: the script of a node that is well, else an orphan of one. Ranks that a
# trainer has started without a launcher, what Slurm keeps, and containers of other users are not listed.
# shellcheck disable=SC2013
for file in $(grep -lzs '^CLUSTER_JOB_ID=' /proc/[0-9]*/environ); do
    if ! grep -qzs '^CLUSTER_ATTEMPT=' "$file" || grep -qzs '^SLURM_JOB_ID=' "$file"; then continue; fi
    pid=${file#/proc/} pid=${pid%/environ}
    job=$(tr '\0' '\n' < "$file" 2>/dev/null | sed -n 's/^CLUSTER_JOB_ID=//p')
    case $(tr '\0' '\n' < "/proc/$pid/cmdline" 2>/dev/null | sed -n '1p;2p' | tr '\n' ' ') in
        "bash "*/attempt-*.sh" ") echo "script $job $pid" ;;
        *) [ -z "$job" ] || echo "process $job $pid" ;;
    esac
done
for runtime in docker podman; do
    command -v "$runtime" >/dev/null || continue
    for container in $(timeout 15 "$runtime" ps -aq --filter label=CLUSTER_JOB_ID 2>/dev/null); do
        about='{{index .Config.Labels "CLUSTER_JOB_ID"}} {{index .Config.Labels "com.docker.compose.project"}}'
        about="u{{.Config.User}} $about {{.State.Status}}"
        read -r user job rest <<< "$("$runtime" inspect --format "$about" "$container" 2>/dev/null)"
        [ -n "$job" ] || continue # it has gone meanwhile
        user=${user#u} user=${user%%:*}
        case ${user:-0} in 0 | "$(id -u)") ;; *) [ "$(id -u)" = 0 ] || continue ;; esac
        # compose starts the agent as the container's own command
        case $rest in ?*" running") echo "script $job $container" ;; *) echo "container $job $container" ;; esac
    done
done
