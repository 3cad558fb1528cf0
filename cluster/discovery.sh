# shellcheck shell=bash
# Describes this machine. It prints names and values, each ended by NUL.
#   machine RUN_DIR DATA_DIR  the machine's network, GPUs and engines, and each folder with its disk
#   routes ADDRESS...         the route to each address, under the address as its name
fields() { printf '%s\0' "$@"; }
limited() { if command -v timeout >/dev/null; then timeout 10 "$@"; else "$@"; fi; }

# The folder $2 and the closest folder above it that exists, under the name $1. A folder may begin with ~/.
folder() {
    local path=$2 existing writable=no
    case $path in \~/*) path=$HOME/${path#\~/} ;; esac
    existing=$path
    while [ ! -e "$existing" ]; do existing=${existing%/*} existing=${existing:-/}; done
    if [ -d "$existing" ] && [ -w "$existing" ]; then writable=yes; fi
    fields "$1" "$path" "$1.there" "$existing" "$1.writable" "$writable" "$1.disk" "$(df -Pk -- "$existing" 2>&1)"
}

case $1 in
machine)
    fields hostname "$(uname -n)" user "$(id -un)" ssh "$SSH_CONNECTION"
    fields addresses "$(ip -o addr show up 2>&1)"
    for device in /sys/class/net/*; do fields "speed ${device##*/}" "$(cat "$device/speed" 2>/dev/null)"; done
    if command -v nvidia-smi >/dev/null; then
        gpus=$(limited nvidia-smi -L 2>&1)
        fields gpus "$gpus" gpus_code $?
    fi
    if command -v docker >/dev/null; then
        about='answers {{.ServerVersion}} {{.SecurityOptions}}'
        fields docker "$(limited docker info --format "$about" 2>&1)"
    fi
    if command -v podman >/dev/null; then
        about='answers {{.Version.Version}} rootless={{.Host.Security.Rootless}}'
        fields podman "$(limited podman info --format "$about" 2>&1)"
    fi
    folder run_dir "$2"
    folder data_dir "$3" ;;
routes)
    shift
    for address; do fields "$address" "$(ip -o route get "$address" 2>&1)"; done ;;
esac
