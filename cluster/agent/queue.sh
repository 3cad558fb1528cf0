# shellcheck shell=bash
# The queue for GPUs on a node. $1 the launcher's ticket, $2 `leave` or the GPUs that it may use. Prints `held JOB ID` for
# each GPU in use, and `ticket NAME` for each launcher that waits. A launcher that has ended stops to renew its ticket.
folder=$(locks)
make_locks "$folder" || exit 1
if [ "$2" = leave ]; then
    rm -f -- "$folder/ticket-$1"
else
    touch -- "$folder/ticket-$1" || exit 1
    find "$folder" -maxdepth 1 -name 'ticket-*' -newermt '20 seconds ago' -printf '%f\n' | sed 's/^ticket-/ticket /'
    holders "$2"
fi
