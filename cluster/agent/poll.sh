# shellcheck shell=bash disable=SC2034,SC2154
# Prints the state of a job's nodes: FOLDER NODE OFFSET for each are the arguments. Variable: `most` (bytes of a log).
state() {
    if first_line "$1/$2.exit"; then
        state="exit $line"
    elif ! [ -d "$1" ]; then
        state="no folder"
    elif is_starting "$1/$2"; then
        state=starting
    elif is_alive "$1/$2"; then
        state=alive
    elif first_line "$1/$2.exit"; then # it has exited since the first line of this function
        state="exit $line"
    else
        state=gone
    fi
}
# Whether the script of the node $1 has not written its pid yet. It may have begun, with a warning of bash in its .err.
is_starting() {
    if [ -s "$1.pid" ]; then return 1; fi
    if ! [ -s "$1.err" ]; then return 0; fi
    grep -qszxF -- "$1.sh" /proc/[0-9]*/cmdline
}
# Whether the script of the node $1 runs. Its pid alone may be another process's by now.
is_alive() { first_line "$1.pid" && has_word "/proc/$line/cmdline" "$1.sh"; }
# Whether the file $1, whose words end with a NUL, has the word $2.
has_word() {
    local word
    while IFS= read -r -d '' word; do
        if [ "$word" = "$2" ]; then return 0; fi
    done < "$1"
    return 1
} 2>/dev/null
nodes "$@"
