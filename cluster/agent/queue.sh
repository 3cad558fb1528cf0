# shellcheck shell=bash
# The queue for GPUs on a node. $1 the launcher's ticket, $2 `leave` or the GPUs that it may use. Prints `held JOB ID` for
# each GPU in use, and `ticket NAME` for each launcher that waits. A launcher that has exited stops renewing its ticket.
folder=$(locks)
make_locks "$folder" || exit 1
if [ "$2" = leave ]; then
    rm -f -- "$folder/ticket-$1"
else
    make_shared "$folder/ticket-$1"
    touch --no-dereference -- "$folder/ticket-$1" || exit 1
    find "$folder" -maxdepth 1 -type f -name 'ticket-*' -newermt '20 seconds ago' -printf '%f\n' |
        tr -cd 'a-z0-9\n-' | sed -n 's/^ticket-/ticket /p'
    holders "$2"
fi
