# shellcheck shell=bash
# Compares and changes the mirror of a folder, or of one file, on a node. $1 is the operation. KEEP is the folder of the hashes
# of the last comparison. LEFT_OUT are patterns with blanks between them; a listing leaves out the names that match.
#   state DATA_DIR MARKER LEFT_OUT [PATH KEY]...  eight fields for each path, each ended by NUL: the kind of its mirror (none,
#       copy, common, elsewhere), the mirror, its KEEP, the free bytes of its disk, the SHA-256 of its listing, that digest at
#       the last comparison, the content's digest then, and `seen` if PATH has the file MARKER. No content is read.
#   list FOLDER KEEP LEFT_OUT  the size of the kept hashes, a newline, the kept hashes, the listing compressed by gzip
#   hash FOLDER                the SHA-256 of each file that the input names, with NUL after each name
#   keep KEEP LISTING CONTENT  the input becomes the kept hashes, for these two digests
#   link FOLDER MIRROR         the mirror becomes a link to the folder
#   unlink MIRROR              the mirror is removed if it is a link; anything else is a failure
#   remove FOLDER              the files that the input names are removed, then the folders that have become empty
#   source FOLDER              the path of rsync, if this machine has it; exits with 3 if there is no such folder
set -uo pipefail
export LC_ALL=C

# Change to the folder of the listing, and set `start` to the name that the listing begins with.
enter() { if [ -d "$1" ]; then cd -- "$1" && start=.; else cd -- "${1%/*}/" && start=./${1##*/}; fi; }

# The listing from `start` without the names $1: every file and every link, in find's order.
listing() {
    local pattern patterns tests=()
    read -r -a patterns <<< "$1"
    for pattern in "${patterns[@]}"; do tests+=(-o -name "$pattern"); done
    find "$start" \( "${tests[@]:1}" \) -prune -o \
        \( -type f -o -type l \) -printf '%y\t%m\t%s\t%T@\t%i\t%p\0%l\0'
}

# The state of the mirror of the path $2 below $1; $3 KEEP, $4 the marker, $5 the names that are left out.
state() {
    local path=$2 mirror=$1$2 keep=$3 marker=$4 state=none listed='' was='' content='' seen='' existing free
    if [ "$(realpath -m -- "$mirror")" != "$(realpath -m -- "$1")$path" ]; then
        if [ "$mirror" -ef "$path" ]; then state=common; else state=elsewhere; fi
    elif [ -e "$mirror" ]; then
        state=copy
        listed=$(enter "$mirror" && listing "$5" | sha256sum) || exit 1
        [ ! -f "$keep/digests" ] || read -r was content < "$keep/digests"
    fi
    existing=$mirror
    while [ ! -e "$existing" ]; do existing=${existing%/*} existing=${existing:-/}; done
    free=$(df --output=avail -B1 -- "$existing" | tail -n 1)
    if [ -n "$marker" ] && { [ -e "$path/$marker" ] || [ -e "${path%/*}/$marker" ]; }; then seen=seen; fi
    printf '%s\0' "$state" "$mirror" "$keep" "${free// /}" "${listed%% *}" "$was" "$content" "$seen"
}

operation=$1
shift
case $operation in
state)
    data=$1 marker=$2 left_out=$3
    shift 3
    case $data in \~/*) data=$HOME/${data#\~/} ;; esac
    while [ $# -gt 0 ]; do
        state "$data" "$1" "$data/.clusterctl/$2" "$marker" "$left_out"
        shift 2
    done ;;
list)
    kept=$2/manifest
    if [ -n "$2" ] && [ -f "$kept" ]; then
        stat -c %s -- "$kept" || exit 1
        cat -- "$kept" || exit 1
    else echo 0; fi
    enter "$1" && listing "$3" | gzip -1 ;;
hash)
    enter "$1" || exit 1
    sums=$(mktemp -d) || exit 1
    trap 'rm -rf -- "$sums"' EXIT
    trap 'exit 1' HUP INT TERM
    # Each batch writes to a file of its own. A common pipe would mix the lines of the batches.
    # shellcheck disable=SC2016
    xargs -0 -r -n 256 -P "$(nproc)" bash -c 'sha256sum -z -- "$@" >> "$0/$$"' "$sums" && cat -- "$sums"/* ;;
keep)
    set -e
    mkdir -p -- "$1"
    rm -f -- "$1/digests"
    cat > "$1/manifest.tmp"
    mv -- "$1/manifest.tmp" "$1/manifest"
    printf '%s %s\n' "$2" "$3" > "$1/digests.tmp"
    mv -- "$1/digests.tmp" "$1/digests" ;;
link)
    set -e
    mkdir -p -- "$(dirname -- "$2")"
    [ ! -d "$2" ] || [ -L "$2" ] || rmdir -- "$2"
    ln -sfn -- "$1" "$2" ;;
unlink) [ -L "$1" ] && rm -f -- "$1" ;;
remove)
    set -e
    cd -- "$1"
    names=$(mktemp)
    trap 'rm -f -- "$names"' EXIT
    cat > "$names"
    xargs -0 -r rm -f -- < "$names"
    xargs -0 -r dirname -z -- < "$names" | sort -zu |
        xargs -0 -r rmdir -p --ignore-fail-on-non-empty -- 2> /dev/null || : ;;
source)
    [ -d "$1" ] || exit 3
    command -v rsync
    exit 0 ;;
esac
