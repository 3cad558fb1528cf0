# shellcheck shell=bash disable=SC2034
# Waits until the child with the process id $1 has exited, and sets `code` to its exit code. Signals do not end it: a trap
# ends bash's `wait`, also while the child still runs.
wait_for() {
    local last
    wait "$1"
    code=$?
    while kill -0 "$1" 2>/dev/null; do # a signal ended `wait`
        wait "$1"
        code=$?
    done
    wait "$1" 2>/dev/null # again, if a signal and the child's end came at once: 127 means that the code is known
    last=$?
    [ "$last" = 127 ] || code=$last
}
