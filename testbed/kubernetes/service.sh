# shellcheck shell=bash
# Processes that outlive the command that started them, each with a pid file and a log. control.sh and node.sh source this.
STOP_TIMEOUT_S=30

fail() { echo "$(hostname): $*" >&2; exit 1; }
log_of() { echo "/var/log/$1.log"; }

# Print the pid of a running service. A zombie has no environment, and another process with this pid has another one.
pid_of() {
    local pid
    pid=$(cat "/run/$1.pid" 2>/dev/null) && grep -qsxz "TESTBED_SERVICE=$1" "/proc/$pid/environ" && echo "$pid"
}
service_runs() { pid_of "$1" >/dev/null; }

# start_service NAME PROGRAM ARGUMENTS...; no-op if it runs.
start_service() {
    local name=$1
    shift
    if service_runs "$name"; then return 0; fi
    TESTBED_SERVICE=$name setsid "$@" >>"$(log_of "$name")" 2>&1 </dev/null &
    echo $! >"/run/$name.pid"
}

stop_service() {
    local pid until
    pid=$(pid_of "$1") || return 0
    kill -CONT "$pid"
    kill "${2:--TERM}" "$pid"
    until=$(($(date +%s) + STOP_TIMEOUT_S))
    while service_runs "$1"; do
        [ "$(date +%s)" -lt "$until" ] || fail "$1 did not stop in $STOP_TIMEOUT_S s"
        sleep 0.1
    done
}
freeze_service() { kill -STOP "$(pid_of "$1")"; }
thaw_service() { if service_runs "$1"; then kill -CONT "$(pid_of "$1")"; fi; }
