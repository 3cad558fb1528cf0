# shellcheck shell=bash disable=SC2154
# Preflight check of a Slurm cluster on its login node: prints a line `WORD TEXT` for each problem, each resource of
# the site, and each variable of Slurm's programs that is set there. Variables, which may be empty: `image` (if it is a
# file), `run_dir`, `new` (the job's folder if it must not exist), `name` (the job's if it must be free), `runtime`, and the
# arrays `version` (the command that fails if the cluster lacks the runtime) and `needs` (paths that must exist).
report_slurm
clear_slurm
for program in sbatch squeue scancel scontrol sinfo flock base64; do
    command -v "$program" >/dev/null || { echo "no_program $program"; none=yes; }
done
[ -z "${none:-}" ] || exit 0
if ! answer=$(timeout 20 sinfo --noheader --format 'partition %P|%D|%c|%G|%l' 2>&1); then
    echo "down ${answer##*$'\n'}"
    exit 0
fi
echo "$answer"
! timeout 20 scontrol show config 2>/dev/null | grep -q '^AccountingStoreFlags.*job_env' || echo stores_env
can_write "$run_dir" 2>/dev/null || echo "run_dir $run_dir$(belongs "$run_dir")"
[ ${#version[@]} = 0 ] || timeout 20 "${version[@]}" > /dev/null 2>&1 < /dev/null ||
    echo "no_runtime $runtime"
[ -z "$image" ] || test -r "$image" || echo "no_image $image"
[ -z "$new" ] || ! test -e "$new" || echo "exists $new"
[ -z "$name" ] || squeue --noheader --user "$(id -un)" --name "$name" --Format JobID:16 |
    sed -n "1s/^ *\([0-9]*\).*/runs Slurm's job \1/p"
for path in "${needs[@]}"; do test -e "$path" || echo "missing $path"; done
exit 0
