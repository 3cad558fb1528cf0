# shellcheck shell=bash disable=SC2154
# Submits an array of jobs, whose folders are "$@". Variables: `path` (of its batch script), `submit` (the command, an array),
# and `secrets`, the number of their lines on stdin (the script follows). Writes each task's number to `submitted` in its
# folder. Prints the command's output.
clear_slurm
read_secrets "$secrets" || exit 1
cat > "$path" || exit 1
printed=$(CLUSTER_SUBMITTED=yes "${submit[@]}") || exit 1
echo "$printed"
task=0
for folder; do
    echo "${printed##* }_$((task++))" > "$folder/submitted" || exit 1
done
! own=$(own_folder "${folder%/*}/.cache" "$(id -u)" "$folder/submitted") || rm -f -- "$own/squeue"
