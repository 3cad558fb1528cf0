# shellcheck shell=bash disable=SC2034
# The state of a job's nodes on this machine. $1 the job, $2 how much of a log at once, then FOLDER NODE OFFSET for each.
# Before the nodes' lines: this machine's clock.
most=$2
shift 2

state() {
    if [ -f "$1/$2.exit" ]; then echo "exit $(cat "$1/$2.exit")"
    elif ! [ -d "$1" ]; then echo "no folder"
    elif ! [ -f "$1/$2.pid" ]; then
        if [ -s "$1/$2.err" ]; then echo gone; else echo starting; fi
    elif { tr '\0' '\n' < "/proc/$(cat "$1/$2.pid")/cmdline"; } 2>/dev/null | grep -qxF "$1/$2.sh"; then echo alive
    elif [ -f "$1/$2.exit" ]; then echo "exit $(cat "$1/$2.exit")"
    else echo gone; fi
}
date +%s.%N
nodes "$@"
