# shellcheck shell=bash
# Preflight check of a node: prints a line `WORD TEXT` for each problem, and for values that are compared between nodes.
# Arguments: $1 engine, $2 image, $3 run directory, $4 device, $5 GPUs, $6 Python, $7 the job's folder if it must not
# exist, $8 the master's ADDRESS:PORT unless this is its node, $9 the master's port if this is its node, ${10} the job's
# name if it must be free, ${11} with GPUs the command that prints the versions in the image; then paths that must exist.
engine=$1 image=$2 folder=$3 device=$4 gpus=$5 python=$6 new=$7 master=$8 port=$9 name=${10} versions=${11}
shift 11

# Prints `port taken ...` if a program listens on port $1. Without ss the agent finds that out.
listener() {
    local found
    found=$(ss -Hltnp "sport = :$1" 2>/dev/null)
    [ -n "$found" ] || return 0
    echo "port taken $(grep -o 'users:.*' <<< "$found" || echo "by a program of another user")"
}
# The processes and containers with the job's name.
namesakes() {
    pids "$name" | sed 's/^/process /'
    [ -z "$engine" ] || "$engine" ps -aq --filter "label=CLUSTER_JOB_ID=$name" 2>/dev/null | sed 's/^/container /'
}
# The GPUs, their driver, and the versions in the image.
gpu_facts() {
    nvidia-smi -L 2>&1 | sed 's/^/listed /'
    nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed 's/^/driver=/'
    eval "timeout 30 $versions" 2>/dev/null < /dev/null
}
[ "$device" != cuda ] || gpu_facts &
[ -z "$port" ] || listener "$port" &
[ -z "$name" ] || namesakes | sed -n '1s/^/runs /p' &
command -v rsync > /dev/null || echo "no_rsync"
[ -z "$folder" ] || can_write "$folder" 2>/dev/null || echo "run_dir $folder"
if [ -z "$engine" ]; then
    "$python" -c "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))" 2>/dev/null || echo torch
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
for path; do test -e "$path" || echo "missing $path"; done
holders "$gpus"
wait
exit 0
