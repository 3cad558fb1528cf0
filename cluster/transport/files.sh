# shellcheck shell=bash
# Reads and changes the mirror of a folder, or of one file, on a node. $1 is the operation.
#   state DATA_DIR MARKER PATH...  three fields for each path, each ended by NUL: the kind of its mirror (none, copy,
#       common, elsewhere), the mirror, and `seen` if PATH has the file MARKER. Exits with 4 without rsync.
#   link FOLDER MIRROR             the mirror becomes a link to the folder
#   unlink MIRROR                  the mirror is removed if it is a link; anything else is a failure
set -uo pipefail
export LC_ALL=C

# The state of the mirror of the path $2 below $1; $3 is the marker.
state() {
    local path=$2 mirror=$1$2 marker=$3 state=none seen=''
    if [ "$(realpath -m -- "$mirror")" != "$(realpath -m -- "$1")$path" ]; then
        if [ "$mirror" -ef "$path" ]; then state=common; else state=elsewhere; fi
    elif [ -e "$mirror" ]; then state=copy; fi
    if [ -n "$marker" ] && { [ -e "$path/$marker" ] || [ -e "${path%/*}/$marker" ]; }; then seen=seen; fi
    printf '%s\0' "$state" "$mirror" "$seen"
}

operation=$1
shift
case $operation in
state)
    command -v rsync > /dev/null || exit 4
    data=$1 marker=$2
    shift 2
    case $data in \~/*) data=$HOME/${data#\~/} ;; esac
    for path; do state "$data" "$path" "$marker"; done ;;
link)
    set -e
    mkdir -p -- "$(dirname -- "$2")"
    [ ! -d "$2" ] || [ -L "$2" ] || rmdir -- "$2"
    ln -sfn -- "$1" "$2" ;;
unlink) [ -L "$1" ] && rm -f -- "$1" ;;
esac
