# shellcheck shell=bash
# The preflight check of a Slurm cluster, from its login node: a line `WORD TEXT` each for what is missing and what the site
# has. $1 runtime, $2 image, $3 the run directory, $4 the job's folder if it must not exist, $5 its name if nothing may have
# it; then paths that must exist.
runtime=$1 image=$2 dir=$3 new=$4 name=$5
shift 5
for program in sbatch squeue scancel scontrol sinfo flock base64; do
    command -v "$program" >/dev/null || { echo "no_program $program"; none=yes; }
done
[ -z "${none:-}" ] || exit 0
if ! answer=$(timeout 20 sinfo --noheader --format 'partition %P|%D|%c|%G|%l' 2>&1); then
    echo "down ${answer##*$'\n'}"
    exit 0
fi
echo "$answer"
can_write "$dir" 2>/dev/null || echo "run_dir $dir"
[ "$runtime" != apptainer ] || test -r "$image" || echo "no_image $image"
[ -z "$new" ] || ! test -e "$new" || echo "exists $new"
[ -z "$name" ] || squeue --noheader --user "$(id -un)" --name "$name" --Format JobID:16 |
    sed -n "1s/^ *\([0-9]*\).*/runs Slurm's job \1/p"
for path; do test -e "$path" || echo "missing $path"; done
timeout 10 sacctmgr --noheader --parsable2 show associations user="$(id -un)" format=account,qos 2>/dev/null |
    while IFS='|' read -r account qos; do
        echo "account $account"
        echo "qos $qos"
    done
exit 0
