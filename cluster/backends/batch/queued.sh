# shellcheck shell=bash
# Prints the launch IDs that have a job in the queue. The arguments are pairs: a launch ID and its job's name. Fails if the
# queue does not answer. It uses the same function `queued` as cancel.sh.
clear_inherited
while [ $# -gt 0 ]; do
    numbers=$(queued "$1" "$2") || exit 1
    [ -z "$numbers" ] || echo "$1"
    shift 2
done
