# shellcheck shell=bash
# Ends the job $1 on this machine: SIGTERM, which the agents pass on to their ranks, and after $2 tenths of a second SIGKILL
# to what is left. Prints a line `process PID` for each that survives.
for pid in $(pids "$1"); do
    grep -qzs '^LOCAL_RANK=' "/proc/$pid/environ" || kill -TERM "$pid" 2>/dev/null
done
for _ in $(seq "$2"); do [ -n "$(pids "$1")" ] || break; sleep 0.1; done
for _ in 1 2 3 4 5; do
    left=$(pids "$1")
    [ -n "$left" ] || break
    # shellcheck disable=SC2086
    kill -KILL $left 2>/dev/null
    sleep 0.2
done
for pid in $left; do echo "process $pid"; done
