# shellcheck shell=bash
# Submits a job array. $1 is the path of its batch script, $2 the lines of secrets on stdin (the script follows); then the
# folders of its jobs, --, and the command that submits. Writes each task's number to `submitted` in its folder. Prints the
# command's output.
clear_slurm
path=$1
read_secrets "$2" || exit 1
shift 2
folders=()
while [ "$1" != -- ]; do
    folders+=("$1")
    shift
done
shift
cat > "$path" || exit 1
printed=$(CLUSTER_SUBMITTED=yes "$@") || exit 1
echo "$printed"
for task in "${!folders[@]}"; do
    echo "${printed##* }_$task" > "${folders[$task]}/submitted" || exit 1
    rm -f -- "${folders[$task]%/*}/.squeue"
done
