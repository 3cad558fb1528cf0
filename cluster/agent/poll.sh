# shellcheck shell=bash
# Prints the state of a job's nodes: FOLDER NODE OFFSET for each are the arguments. Variable: `most` (bytes of a log).
state() {
    if [ -f "$1/$2.exit" ]; then echo "exit $(cat "$1/$2.exit")"
    elif ! [ -d "$1" ]; then echo "no folder"
    # The script has begun, perhaps with a warning of bash in its .err.
    elif ! [ -s "$1/$2.pid" ] && { ! [ -s "$1/$2.err" ] || grep -qszxF -- "$1/$2.sh" /proc/[0-9]*/cmdline; }; then echo starting
    elif { tr '\0' '\n' < "/proc/$(cat "$1/$2.pid")/cmdline"; } 2>/dev/null | grep -qxF "$1/$2.sh"; then echo alive
    elif [ -f "$1/$2.exit" ]; then echo "exit $(cat "$1/$2.exit")"
    else echo gone; fi
}
nodes "$@"
