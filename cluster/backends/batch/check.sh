# shellcheck shell=bash disable=SC2154
# Preflight check of a batch system on its login node: prints a line `WORD TEXT` for each problem, each resource of the site,
# and each variable of the batch system's programs that is set there. Variables, which may be empty: `image` (if it is a
# file), `run_dir`, `new` (the job's folder if it must not exist), `name` (the job's if it must be free), `runtime`,
# `scheduler` (the batch system's name), and the arrays `programs`, `version` (the command that fails if the cluster lacks
# the runtime) and `needs` (paths that must exist). The batch system's common.sh has, besides `clear_inherited`:
#
# report_inherited    prints a line `inherited NAME=VALUE` for each variable that clear_inherited unsets
# describe_site       prints lines on the site; if the batch system does not answer, it prints why and fails
# named NAME          prints the numbers of this user's jobs with a name
report_inherited
clear_inherited
for program in "${programs[@]}" flock base64; do
    command -v "$program" >/dev/null || { echo "no_program $program"; none=yes; }
done
[ -z "${none:-}" ] || exit 0
if ! lines=$(describe_site); then
    echo "down ${lines##*$'\n'}"
    exit 0
fi
echo "$lines"
can_write "$run_dir" 2>/dev/null || echo "run_dir $run_dir$(belongs "$run_dir")"
[ ${#version[@]} = 0 ] || timeout 20 "${version[@]}" > /dev/null 2>&1 < /dev/null ||
    echo "no_runtime $runtime"
[ -z "$image" ] || test -r "$image" || echo "no_image $image"
[ -z "$new" ] || ! test -e "$new" || echo "exists $new"
if [ -n "$name" ]; then
    read -r number _ <<< "$(named "$name" | head -n 1)"
    [ -z "$number" ] || echo "runs $scheduler's job $number"
fi
for path in "${needs[@]}"; do test -e "$path" || echo "missing $path"; done
exit 0
