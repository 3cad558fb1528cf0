# shellcheck shell=bash
# The preflight check of a node: a line `WORD TEXT` for each thing that is missing, or is to be compared between nodes. $1
# runtime, $2 image, $3 run directory, $4 device, $5 GPUs, $6 Python, $7 the job's folder if it must not exist yet, $8 the
# master's address:port unless this is its node, $9 its port if it is, $10 the job's name if nothing may have it yet; then
# paths that must exist.
runtime=$1 image=$2 folder=$3 device=$4 gpus=$5 python=$6 new=$7 master=$8 port=$9 name=${10}
shift 10

# Prints `port taken ...`, who listens on port $1. A Python sees also a port that is bound and not listened on.
listener() {
    if command -v "$python" >/dev/null; then
        "$python" -IS - "$1" <<'END'
import socket, sys
with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(("", int(sys.argv[1])))
    except OSError:
        sys.exit(1)
END
        [ $? -eq 1 ] || return 0
    elif [ -z "$(ss -Hltn "sport = :$1")" ]; then return 0; fi
    local holder
    holder=$(ss -Hltnp "sport = :$1" 2>/dev/null | grep -o 'users:.*' | head -n 1)
    echo "port taken ${holder:-by a program that this user may not see}"
}
# What has the job's name here.
namesakes() {
    pids "$name" | sed 's/^/process /'
    [ "$runtime" = none ] || "$runtime" ps -aq --filter "label=CLUSTER_JOB_ID=$name" 2>/dev/null | sed 's/^/container /'
}
[ -z "$port" ] || listener "$port" &
[ -z "$name" ] || namesakes | sed -n '1s/^/runs /p' &
test -r /proc/self/environ && command -v setsid flock base64 >/dev/null || echo "tools"
command -v rsync > /dev/null || echo "no_rsync"
[ -z "$folder" ] || can_write "$folder" 2>/dev/null || echo "run_dir $folder"
case $runtime in
none) "$python" -c "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))" 2>/dev/null || echo torch ;;
*)
    if ! command -v "$runtime" >/dev/null; then echo "no_runtime $runtime"
    elif ! why=$("$runtime" version --format '{{.Server.Version}}' 2>&1 >/dev/null); then echo "engine ${why##*$'\n'}"
    elif ! id=$("$runtime" image inspect --format '{{.Id}} {{.Architecture}}' "$image" 2>/dev/null); then echo no_image
    else echo "image $id $(uname -m)"; fi ;;
esac
# Nothing listens there yet: a refusal shows that the way is open.
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
if [ "$device" = cuda ]; then
    found=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | tr '\n' ' ')
    for id in ${gpus//,/ }; do case " $found " in *" $id "*) ;; *) echo "no_gpu $id" ;; esac done
fi
holders "$gpus"
wait
exit 0
