# shellcheck shell=bash
# Keeps a file that a push sends. $2 is the file's name.
#   receive FILE      print how many bytes have arrived, then append the input to them; print `complete` if FILE is whole
#   keep FILE SHA256  FILE is whole now; exits with 9 if its digest is another one, and removes it
set -e -o pipefail
enter_cache
case $1 in
receive)
    [ ! -e "$2" ] || { echo complete; exit 0; }
    # A connection that broke may still be writing.
    exec 9>>"$2.part"
    flock -w 20 9 || { echo "another push is sending this image" >&2; exit 1; }
    wc -c <"$2.part"
    exec cat >&9 ;;
keep)
    read -r sum _ < <(sha256sum "$2.part")
    [ "$sum" = "$3" ] || { rm -f "$2.part"; exit 9; }
    mv "$2.part" "$2" ;;
esac
