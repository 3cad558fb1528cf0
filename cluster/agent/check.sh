# shellcheck shell=bash disable=SC2154
# Preflight check of a node: prints a line `WORD TEXT` for each problem, and for values that are compared between nodes.
# Variables, which may be empty: `engine`, `image`, `run_dir`, `device`, `gpus`, `python`, `new` (the job's folder if it must
# not exist), `master` (its ADDRESS:PORT unless this is its node), `port` (the master's if this is its node), `name` (the
# job's if it must be free), and the arrays `versions` (the command that prints those in the image) and `needs` (paths that
# must exist).

# Prints `port taken ...` if a program listens on port $1. Without ss the agent finds that out.
listener() {
    local found
    found=$(ss -Hltnp "sport = :$1" 2>/dev/null)
    [ -n "$found" ] || return 0
    echo "port taken $(grep -o 'users:.*' <<< "$found" || echo "by a program of another user")"
}
# Whether $1 can be run. bash's `command` reads the mode bits of a path; `test` asks the kernel, which knows of more rights.
is_program() { command -v "$1" >/dev/null || { [ -f "$1" ] && [ -x "$1" ]; }; }
# This user's processes with the job's name, and all containers with it: an engine takes each name once.
namesakes() {
    local pid
    for pid in $(having "CLUSTER_JOB_ID=$name"); do
        [ "$(user_of "$pid")" != "$(id -u)" ] || echo "process $pid"
    done
    [ -z "$engine" ] || "$engine" ps -aq --filter "label=CLUSTER_JOB_ID=$name" 2>/dev/null | sed 's/^/container /'
}
# The GPUs, their driver, and the versions in the image.
gpu_facts() {
    nvidia-smi -L 2>&1 | sed 's/^/listed /'
    nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed 's/^/driver=/'
    [ ${#versions[@]} = 0 ] || timeout 30 "${versions[@]}" 2>/dev/null < /dev/null
}
[ "$device" != cuda ] || gpu_facts &
[ -z "$port" ] || listener "$port" &
[ -z "$name" ] || namesakes | sed -n '1s/^/runs /p' &
command -v rsync > /dev/null || echo "no_rsync"
[ -z "$run_dir" ] || can_write "$run_dir" 2>/dev/null || echo "run_dir $run_dir$(belongs "$run_dir")"
if [ -z "$engine" ]; then
    if ! is_program "$python"; then echo no_python
    else "$python" -c "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))" 2>/dev/null || echo torch
    fi
elif ! command -v "$engine" >/dev/null; then echo "no_runtime $engine"
elif ! why=$("$engine" version --format '{{.Server.Version}}' 2>&1 >/dev/null); then echo "engine ${why##*$'\n'}"
elif ! id=$("$engine" image inspect --format '{{.Id}} {{.Architecture}}' "$image" 2>/dev/null); then echo no_image
else echo "image $id $(uname -m)"; fi
# Nothing listens there yet: a refused connection shows that the port is reachable.
# shellcheck disable=SC2016
if [ -n "$master" ]; then
    why=$(timeout 3 bash -c ': < "/dev/tcp/$0/$1"' "${master%:*}" "${master##*:}" 2>&1) || case $why in
        *refused*) ;;
        *)
            why=${why%%$'\n'*}
            why=${why##*: }
            echo "no_way $master: ${why:-no answer within 3 s}" ;;
    esac
fi
[ -z "$new" ] || ! test -e "$new" || echo "exists $new"
for path in "${needs[@]}"; do test -e "$path" || echo "missing $path"; done
holders "$gpus"
wait
exit 0
