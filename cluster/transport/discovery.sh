# shellcheck shell=bash disable=SC2154
# Prints facts about this machine as names and values, each terminated by NUL.
#   machine [ENGINE TEMPLATE]...  the machine's network and GPUs, the folders `run_dir` and `data_dir`, the free bytes for
#                             the first, and the output of each engine's `info --format TEMPLATE`
#   routes ADDRESS...         the route to each address; the address is the name
fields() { printf '%s\0' "$@"; }

# The folder $1, which may begin with ~/.
absolute() { case $1 in \~/*) printf '%s\n' "$HOME/${1#\~/}" ;; *) printf '%s\n' "$1" ;; esac }

case $1 in
machine)
    fields hostname "$(uname -n)" user "$(id -un)" ssh "$SSH_CONNECTION"
    fields addresses "$(ip -o addr show up 2>&1)"
    for device in /sys/class/net/*; do fields "speed ${device##*/}" "$(cat "$device/speed" 2>/dev/null)"; done
    if command -v nvidia-smi >/dev/null; then
        gpus=$(timeout 10 nvidia-smi -L 2>&1)
        fields gpus "$gpus" gpus_code $?
    fi
    existing=$(absolute "$run_dir")
    fields run_dir "$existing" data_dir "$(absolute "$data_dir")"
    while [ ! -e "$existing" ]; do existing=${existing%/*} existing=${existing:-/}; done
    fields free "$(df --output=avail -B1 -- "$existing" | tail -n 1)"
    shift
    while [ $# -gt 0 ]; do
        if command -v "$1" >/dev/null; then fields "$1" "$(timeout 10 "$1" info --format "$2" 2>&1)"; fi
        shift 2
    done ;;
routes)
    shift
    for address; do fields "$address" "$(ip -o route get "$address" 2>&1)"; done ;;
esac
