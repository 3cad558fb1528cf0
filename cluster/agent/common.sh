# shellcheck shell=bash
# Functions of the scripts that the launcher runs on machines.

# Sets `line` to the first line of the file $1; whether it has one. A longer status than this is not read anyway.
first_line() {
    line=
    if [ ! -f "$1" ] || [ -L "$1" ]; then return 1; fi # a job may put a link or a FIFO in its place
    IFS= read -r -n 1048577 line < "$1" || [ -n "$line" ]
} 2>/dev/null

# Prints the end of the file $1, at most 1 MiB, unless a job has put a link in its place.
end_of() { dd if="$1" iflag=nofollow,nonblock status=none 2>/dev/null | tail -c 1048576; }

# The last line of the file $1, the messages of a runtime, without the advice that docker and podman print after an error.
last_error() {
    end_of "$1" | grep -v -e "^See '.*--help'" -e "^Run '.*--help'" -e '^[[:space:]]*$' | tail -n 1 | tail -c 4096
}

# Whether the folder $1 is writable and its disk is not full.
can_write() {
    local probe ok
    mkdir -p -- "$1" && probe=$(mktemp -- "$1/.probe.XXXXXX") || return 1
    head -c 4096 /dev/zero > "$probe"
    ok=$?
    rm -f -- "$probe"
    return $ok
}

# Whom the folder $1, or the closest one above it that exists, belongs to, if this user cannot write there.
belongs() {
    local at=$1
    until [ -e "$at" ]; do at=$(dirname -- "$at"); done
    [ -w "$at" ] || [ -O "$at" ] || stat -c ': %n belongs to %U and has the mode %a' -- "$at"
}

# Prints why a file of 4 KB cannot be written next to $1, or nothing.
no_room() {
    { printf '%4096s' "" > "$1.room.tmp"; } 2>&1 | sed -n 's/.*: //p'
    rm -f -- "$1.room.tmp"
}

# Exports the $1 lines of secrets on stdin as one variable, whose text agent/node.sh evaluates. By their own names they could
# change what this machine's programs do.
read_secrets() {
    local text
    [ "$1" -gt 0 ] || return 0
    mapfile -n "$1" text && printf -v CLUSTER_SECRET_VALUES %s "${text[@]}" && export CLUSTER_SECRET_VALUES
}

# The time in milliseconds.
milliseconds() { echo $(($(date +%s%N) / 1000000)); }

# The processes on this machine that were started with the variable $1 (NAME=VALUE).
having() { grep -lzxs -- "$1" /proc/[0-9]*/environ | cut -d/ -f3; }

# The real user of the process $1. The owner of /proc/$1 is root for a process with special rights.
user_of() { sed -n 's/^Uid:[[:space:]]*\([0-9]*\).*/\1/p' "/proc/$1/status" 2>/dev/null; }

# The folder of the GPU locks of all users. The processes of a node's script hold them until the last one exits.
locks() { printf '%s\n' "${CLUSTERCTL_LOCKS:-/tmp/clusterctl-gpus}"; }

# Creates the folder $1 of the locks. It belongs to the first user, so nothing in it is trusted: not what a path leads to,
# and not what a file contains. Without the sticky bit anybody else could also remove the locks.
make_locks() {
    mkdir -m 1777 -- "$1" 2>/dev/null
    case $(stat -c %u:%a -- "$1") in # of a link itself, which has the mode 777, not of what it leads to
        *:[1357]777 | 0:*[0145][0145] | "$(id -u)":*[0145][0145]) return ;;
    esac
    echo "the folder of the GPU locks $1 must be a folder with mode 1777" >&2
    return 1
}

# Creates the file $1, which all users may write, unless it exists. With noclobber, bash opens it with O_EXCL. A kernel may
# forbid O_CREAT on another user's file (fs.protected_regular).
make_shared() { [ -e "$1" ] || (umask 0 && set -o noclobber && : > "$1") 2>/dev/null; }

# Opens the lock file $1 of the physical folder as `lock`. The file that is open counts, because the path may lead to
# another one by now: a link, or a hard link to a file of this user. A FIFO would not open.
open_lock() {
    make_shared "$1"
    [ -f "$1" ] && exec {lock}< "$1" &&
        [ "$(readlink "/proc/self/fd/$lock")" = "$1" ] && [ "$(stat -L -c %h "/proc/self/fd/$lock")" = 1 ] && return
    echo "$1 is not a lock file that this user can use" >&2
    return 1
}

# The job that the lock file $1 names.
holder() { head -c 48 -- "$1" | tr -cd 'a-z0-9-'; }

# Locks the GPUs $1 (0,1,...) for the job $2, until the last process that inherits the locks exits. If another job
# holds one, prints its name and returns 74.
take_locks() {
    local folder id lock held patience
    [ -n "$1" ] || return 0
    make_locks "$(locks)" && folder=$(cd -P -- "$(locks)" && pwd) || return 1
    for id in ${1//,/ }; do
        open_lock "$folder/gpu-$id.lock" || return 1
        held=$(holder "/proc/self/fd/$lock")
        # An earlier attempt of the same job may still be ending.
        [ "$held" = "$2" ] && patience=10 || patience=0
        if ! flock --wait "$patience" "$lock"; then
            holder "/proc/self/fd/$lock"
            return 74
        fi
        printf '%s\n' "$2" | dd of="/proc/self/fd/$lock" conv=nocreat status=none
    done
}

# A line `held JOB ID` for each of the GPUs $1 (0,1,...) that another script holds.
holders() {
    local id lock
    for id in ${1//,/ }; do
        lock="$(locks)/gpu-$id.lock"
        [ ! -f "$lock" ] || flock --nonblock --shared 9 9< "$lock" || echo "held $(holder "$lock") $id"
    done
}

# How each node of an attempt is: four lines a node for the arguments FOLDER NODE OFFSET (of its log; "": not wanted).
# `exit CODE TIME`, `alive`, `gone`, `starting` or `no folder`; why, if the machine knows; the agent's status; the log from
# there on, at most $most bytes, in base64. The state comes first: a node that has exited has written its last line.
# The function `state FOLDER NODE` of the caller sets `state`. As few new processes as possible: a launcher polls twice a second.
nodes() {
    local folder node at state line
    while [ $# -gt 0 ]; do
        folder=$1 node=$2 at=$3
        shift 3
        state "$folder" "$node"
        echo "$state"
        case $state in
            exit" 0 "* | alive | starting | no*) echo ;;
            *) why "$folder/$node" "$state" ;;
        esac
        first_line "$folder/$node.json"
        printf '%s\n' "$line"
        # nofollow: a job may put a link in its place.
        if [ -n "$at" ] && [ -f "$folder/$node.log" ]; then
            # shellcheck disable=SC2154
            dd if="$folder/$node.log" iflag=skip_bytes,count_bytes,nofollow skip="$at" count="$most" bs=64K status=none 2>/dev/null |
                base64 -w 0
        fi
        echo
    done
}
# Prints why the node $1 is in the state $2: a full disk, or the error of the runtime or script. The agent has written no
# status, or it could not write it.
why() {
    local room
    room=$(no_room "$1")
    case $room:$2 in
        ?*:*) ;;
        :gone | ":exit 73 "*) room=$(last_error "$1.err") ;;
        *) [ -e "$1.json" ] || room=$(last_error "$1.err") ;;
    esac
    echo "$room"
}
