# shellcheck shell=bash
# Submits a job array. The input is its batch script, which becomes the file $1. Then the folders of its jobs, --, and the command
# that submits. Each folder gets the number of its task in `submitted`. Prints what the command prints.
path=$1
shift
folders=()
while [ "$1" != -- ]; do
    folders+=("$1")
    shift
done
shift
cat > "$path" || exit 1
printed=$(CLUSTER_SUBMITTED=yes "$@") || exit
echo "$printed"
for task in "${!folders[@]}"; do
    echo "${printed##* }_$task" > "${folders[$task]}/submitted" || exit 1
    rm -f -- "${folders[$task]%/*}/.squeue"
done
