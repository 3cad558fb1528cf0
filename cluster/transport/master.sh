# shellcheck shell=bash
# Keeps a connection of ssh open until stdin ends: the launcher closes it, or has died. Then removes FOLDER.
#   FOLDER SSH...   FOLDER gets ssh's process id and its stderr; then the command
folder=$1
shift
"$@" </dev/null >/dev/null 2>"$folder/stderr" &
echo $! >"$folder/pid"
read -r _
kill %1 2>/dev/null # not by its id, which another process may have by now
wait
rm -rf -- "$folder"
