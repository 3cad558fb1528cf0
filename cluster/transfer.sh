# shellcheck shell=bash
# Moves files to and from a node. $1 is the operation. BESIDE is a folder for unfinished files, on the file system of TARGET.
#   prepare TARGET BESIDE  make both folders, and print `rsync` if this machine has it
#   unpack TARGET BESIDE   unpack the tar archive of the input into TARGET; a file appears there when it is complete
#   pack FOLDER            print a tar archive of the files that the input names, with NUL after each name
set -uo pipefail
operation=$1
shift
case $operation in
prepare)
    target=$1 beside=$2
    mkdir -p -- "$target" "$beside/tmp" || exit 1
    # A transfer that was killed left files. The younger ones may belong to a transfer that is still running.
    find "$beside" -mindepth 1 -maxdepth 2 \( -path "*/tmp/*" -o -name "incoming.*" \) -mmin +60 -exec rm -rf -- {} +
    command -v rsync > /dev/null && echo rsync
    exit 0 ;;
unpack)
    set -e
    target=$1 beside=$2
    incoming=$(mktemp -d -- "$beside/incoming.XXXXXX")
    trap 'rm -rf -- "$incoming"' EXIT
    trap 'exit 1' HUP INT TERM
    tar -x -p --no-same-owner -f - -C "$incoming"
    cd -- "$incoming"
    find . -type d -print0 | while IFS= read -r -d '' folder; do
        mkdir -p -- "$target/$folder"
        find "$folder" -mindepth 1 -maxdepth 1 ! -type d -print0 | xargs -0 -r mv -f -t "$target/$folder" --
    done ;;
pack)
    set -e
    # The input is read to its end before the archive begins: else each side could wait for the other.
    names=$(mktemp)
    trap 'rm -f -- "$names"' EXIT
    cat > "$names"
    tar -c --format=posix -C "$1" --no-unquote --null -T "$names" -f - || [ $? = 1 ] ;;
esac
