# shellcheck shell=bash
# Submits a job array. Reads its batch script from stdin and writes it to $1; then the folders of its jobs, --, and the
# command that submits. Writes each task's number to `submitted` in its folder. Prints the command's output.
clear_slurm
path=$1
shift
folders=()
while [ "$1" != -- ]; do
    folders+=("$1")
    shift
done
shift
cat > "$path" || exit 1
if ! printed=$(CLUSTER_SUBMITTED=yes "$@"); then
    rm -f -- "${folders[@]/%//secrets}"
    exit 1
fi
echo "$printed"
for task in "${!folders[@]}"; do
    echo "${printed##* }_$task" > "${folders[$task]}/submitted" || exit 1
    rm -f -- "${folders[$task]%/*}/.squeue"
done
