"""The small bash texts that run on a node, whichever way it is reached; values reach them as arguments or input."""

#: The exit code of START when another job holds the GPUs.
HELD = 74

# Who holds which of our GPUs: one line `JOB IDS` per running node script.
_HOLDERS = r"""
holders() {
    local file job ids
    for file in $(grep -lzs '^CLUSTER_GPUS=.' /proc/[0-9]*/environ); do
        job=$(tr '\0' '\n' < "$file" 2>/dev/null | sed -n 's/^CLUSTER_JOB_ID=//p')
        ids=$(tr '\0' '\n' < "$file" 2>/dev/null | sed -n 's/^CLUSTER_GPUS=//p')
        [ -z "$ids" ] || echo "$job $ids"
    done | sort -u
}
"""
# `$1` is the attempt's folder, `$2` the node, `$3` the job, `$4` its GPUs, `$5` how many lines of the input are secrets
# (the script follows them). Under a lock, so that of two launches at once one finds the other.
START = (
    _HOLDERS
    + r"""
umask 077
mkdir -p -- "$1" || exit 1
if [ "$5" -gt 0 ]; then mapfile -n "$5" lines && printf %s "${lines[@]}" > "$1/$2.secrets" || exit 1; fi
cat > "$1/$2.sh" || exit 1
chmod 644 -- "$1/$2.sh"; chmod 755 -- "$1"
exec 9> "${TMPDIR:-/tmp}/clusterctl-$(id -u).lock" && flock -w 20 9 || exit 1
if [ -n "$4" ]; then
    holders | while read -r job ids; do
        for id in ${4//,/ }; do
            case ",$ids," in *",$id,"*) [ "$job" = "$3" ] || { echo "$job"; break 2; } ;; esac
        done
    done > "$1/$2.held"
    held=$(cat "$1/$2.held"); rm -f -- "$1/$2.held"
    if [ -n "$held" ]; then rm -f -- "$1/$2.secrets"; echo "$held"; exit 74; fi
fi
umask 022
env "CLUSTER_JOB_ID=$3" "CLUSTER_GPUS=$4" setsid bash "$1/$2.sh" < /dev/null > /dev/null 2> "$1/$2.err" 9>&- &
"""
)
# Arguments: the job, how much of a log at once, then for each node its attempt's folder, its name, where to go on in
# its log ("": it is read otherwise). Two lines for each node: its state, then that part of the log in base64, so
# that bytes stay bytes. The state comes first: what has exited by then has written its last line.
_ENDED = """
# A disk without room takes neither the exit code nor the log's last lines, which would say so.
no_room() {
    { printf '%4096s' "" > "$1.room.tmp"; } 2>&1 | sed -n 's/.*: //p'
    rm -f -- "$1.room.tmp"
}
ended() {
    local end; end=$(cat "$1.exit")
    # the runtime's own refusals: nothing that we run says why
    case $end in
        12[567]" "*) end="$end $(tail -n 1 "$1.log")" ;;
        1" "*) end="$end $(no_room "$1")" ;;
    esac
    echo "exited $end"
}
"""
_EACH = """
while [ $# -gt 0 ]; do
    dir=$1 node=$2 at=$3; shift 3
    if [ -f "$dir/$node.exit" ]; then ended "$dir/$node"; else state "$dir" "$node"; fi
    if [ -n "$at" ] && [ -f "$dir/$node.log" ]; then
        tail -c "+$((at + 1))" -- "$dir/$node.log" | head -c "$most" | base64 -w 0
    fi
    echo
done
"""
LOOK = (
    _ENDED
    + """
state() {
    if ! [ -d "$1" ]; then echo "lost its folder is not there: $1"
    elif ! [ -f "$1/$2.pid" ]; then
        if [ -s "$1/$2.err" ]; then echo "lost $(head -n 1 "$1/$2.err")"; else echo starting; fi
    elif grep -qzxs "CLUSTER_JOB_ID=$job" "/proc/$(cat "$1/$2.pid")/environ"; then echo alive
    elif [ -f "$1/$2.exit" ]; then ended "$1/$2"
    else
        local why; why=$(no_room "$1/$2")
        echo "lost its process is gone and left no exit code${why:+: $why}"
    fi
}
job=$1 most=$2; shift 2
"""
    + _EACH
)
# The same for a job of Slurm, whose processes are elsewhere. `$1` the job, `$2` how much of a log, `$3` columns of
# squeue, `$4` the job's folder, `$5` how old in seconds squeue's answer may be: one call serves all jobs. Before
# the nodes' lines: squeue's line of the job, the attempt that runs and its hosts, what keeps squeue from answering, the
# batch script's error.
LOOK_QUEUE = (
    _ENDED
    + r"""
state() { echo alive; }
job=$1 most=$2 format=$3 folder=$4 old=$5; shift 5
cache="${folder%/*}/.squeue"  # in the run directory: /tmp of a login node is everybody's
exec 9>> "$cache.lock"; flock -w 20 9
if [ $(($(date +%s) - $(stat -c %Y "$cache" 2>/dev/null || echo 0))) -ge "$old" ]; then
    if timeout 15 squeue --noheader --user "$(id -un)" --states all --Format "$format" > "$cache.new" 2> "$cache.err"
    then mv -- "$cache.new" "$cache"
    else touch -- "$cache"; fi
fi
exec 9>&-
grep -e "^$job " "$cache" 2>/dev/null | sort -k 2,2n | tail -n 1 | tr -d '\n'; echo
head -n 1 "$folder/attempt" 2>/dev/null || echo
head -n 1 "$cache.err" 2>/dev/null | tr -d '\n'; echo
grep '^error: ' "$folder/slurm.log" 2>/dev/null | tail -n 1 | tr -d '\n'; echo
"""
    + _EACH
)
# `$1` the attempt's folder, `$2` the job's, `$3` how many lines of the input are secrets (the batch script follows),
# then the command that submits. Prints the job's number.
SUBMIT = r"""
dir=$1 folder=$2 lines=$3; shift 3
mkdir -p -- "$dir" && cd -- "$dir" || exit 1
if [ "$lines" -gt 0 ]; then
    (umask 077; mapfile -n "$lines" text && printf %s "${text[@]}" > "$folder/secrets") || exit 1
fi
cat > "$dir/job.sbatch" || exit 1
touch -- "$folder/submitted"
CLUSTER_SUBMITTED=yes "$@"
code=$?
# Once nobody asks: what squeue said before does not know the job.
exec 9>> "${folder%/*}/.squeue.lock"; flock -w 20 9
rm -f -- "${folder%/*}/.squeue"
exit "$code"
"""
# Ends what has the name `$1`: asks its batch script, and after `$2` seconds Slurm, whose signals go to Apptainer's file
# systems, too, so that what runs in them hangs; prints what stays. `$3` is the job's folder.
CANCEL_QUEUE = r"""
left() { squeue --noheader --user "$(id -un)" --name "$1" --Format JobID:16 | tr -d ' ' | sort -u; }
until_gone() { for _ in $(seq "$2"); do [ -n "$(left "$1")" ] || break; sleep 1; done; }
running=$(squeue --noheader --user "$(id -un)" --name "$1" --states running --Format JobID:16 | tr -d ' ')
if [ "$2" -gt 0 ] && [ -n "$running" ]; then scancel --batch --signal=TERM $running && until_gone "$1" "$2"; fi
[ -z "$(left "$1")" ] || scancel --user "$(id -un)" --name "$1" || exit 1
until_gone "$1" 90
rm -f -- "${3%/*}/.squeue" "$3/secrets"
for job in $(left "$1"); do echo "Slurm's job $job"; done
"""
# Whether something can be written in a folder: a full disk has the rights as well.
_CAN_WRITE = r"""
can_write() {
    local probe ok
    mkdir -p -- "$1" && probe=$(mktemp -- "$1/.probe.XXXXXX") || return 1
    head -c 4096 /dev/zero > "$probe"; ok=$?
    rm -f -- "$probe"
    return $ok
}
"""
# What a job needs of a Slurm cluster, seen from its login node, a line `word text` each: what is not there, what the
# site has. `$1` runtime, `$2` image, `$3` the run directory, `$4` the job's folder if it must not be there, `$5` its
# name if nothing may have it; then paths.
PREPARE_QUEUE = (
    _CAN_WRITE
    + r"""
runtime=$1 image=$2 dir=$3 new=$4 name=$5; shift 5
for program in sbatch squeue scancel scontrol sinfo flock base64; do
    command -v "$program" >/dev/null || { echo "no_program $program"; none=yes; }
done
[ -z "${none:-}" ] || exit 0
if ! said=$(timeout 20 sinfo --noheader --format 'partition %P|%D|%c|%G|%l' 2>&1); then
    echo "down ${said##*$'\n'}"; exit 0
fi
echo "$said"
can_write "$dir" 2>/dev/null || echo "run_dir $dir"
[ "$runtime" != apptainer ] || test -r "$image" || echo "no_image $image"
[ -z "$new" ] || ! test -e "$new" || echo "exists $new"
[ -z "$name" ] || squeue --noheader --user "$(id -un)" --name "$name" --Format JobID:16 |
    sed -n "1s/^ *\([0-9]*\).*/runs Slurm's job \1/p"
for path; do test -e "$path" || echo "missing $path"; done
timeout 10 sacctmgr --noheader --parsable2 show associations user="$(id -un)" format=account,qos 2>/dev/null |
    while IFS='|' read -r account qos; do echo "account $account"; echo "qos $qos"; done
exit 0
"""
)
# Signals everything at once, then kills what is left after `$2` tenths of a second; prints how many survived that.
CANCEL = """
pids() { grep -lzxs "CLUSTER_JOB_ID=$1" /proc/[0-9]*/environ | cut -d/ -f3; }
left=$(pids "$1")
[ -z "$left" ] || kill -TERM $left 2>/dev/null
for _ in $(seq "$2"); do left=$(pids "$1"); [ -z "$left" ] && break; sleep 0.1; done
for _ in 1 2 3 4 5; do
    left=$(pids "$1"); [ -z "$left" ] && break
    kill -KILL $left 2>/dev/null; sleep 0.2
done
for pid in $left; do echo "process $pid"; done
"""
# What runs here for jobs, one `kind job what` a line: the node script of a job that is well, else what is left of one.
# Not ours to judge: ranks that a trainer has started by itself, what Slurm keeps, containers of other users.
PRESENT = r"""
for file in $(grep -lzs '^CLUSTER_JOB_ID=' /proc/[0-9]*/environ); do
    grep -qzs '^CLUSTER_ATTEMPT=' "$file" && ! grep -qzs '^SLURM_JOB_ID=' "$file" || continue
    pid=${file#/proc/} pid=${pid%/environ}
    job=$(tr '\0' '\n' < "$file" 2>/dev/null | sed -n 's/^CLUSTER_JOB_ID=//p')
    case $(tr '\0' '\n' < "/proc/$pid/cmdline" 2>/dev/null | sed -n '1p;2p' | tr '\n' ' ') in
        "bash "*/attempt-*.sh" ") echo "script $job $pid" ;;
        *) [ -z "$job" ] || echo "process $job $pid" ;;
    esac
done
for runtime in docker podman; do
    command -v "$runtime" >/dev/null || continue
    for container in $(timeout 15 "$runtime" ps -aq --filter label=CLUSTER_JOB_ID 2>/dev/null); do
        about='{{index .Config.Labels "CLUSTER_JOB_ID"}} {{index .Config.Labels "com.docker.compose.project"}}'
        about="u{{.Config.User}} $about {{.State.Status}}"
        read -r user job rest <<< "$("$runtime" inspect --format "$about" "$container" 2>/dev/null)"
        [ -n "$job" ] || continue  # it has gone meanwhile
        user=${user#u} user=${user%%:*}
        case ${user:-0} in 0 | "$(id -u)") ;; *) [ "$(id -u)" = 0 ] || continue ;; esac
        # compose starts the script inside the container
        case $rest in ?*" running") echo "script $job $container" ;; *) echo "container $job $container" ;; esac
    done
done
"""
# Prints `port taken ...`, who listens on port `$1`, or nothing; `ss` names it when we may know it. `$2` is a
# Python, if there is one: it sees also a port that is bound and not listened on; without its packages it starts faster.
_PORT = """
listener() {
    if command -v "$2" >/dev/null; then
        "$2" -IS - "$1" <<'END'
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
    local holder; holder=$(ss -Hltnp "sport = :$1" 2>/dev/null | grep -o 'users:.*' | head -n 1)
    echo "port taken ${holder:-by a program that this user may not see}"
}
"""
# What must be so on a node before anything is started: a line `word text` for each thing that is not, or is to be
# compared between nodes. `$1` runtime, `$2` image, `$3` run directory, `$4` device, `$5` GPUs, `$6` Python, `$7` the
# job's folder if it must not be there yet, `$8` the master's address:port unless this is its node, `$9` its port
# if it is, `$10` the job's name if nothing may have it yet; then paths.
PREPARE = (
    _HOLDERS
    + _PORT
    + _CAN_WRITE
    + r"""
runtime=$1 image=$2 dir=$3 device=$4 gpus=$5 python=$6 new=$7 master=$8 port=$9 name=${10}; shift 10
namesakes() {
    grep -lzxs "CLUSTER_JOB_ID=$name" /proc/[0-9]*/environ | sed 's|/proc/|process |; s|/environ||'
    [ "$runtime" = none ] || "$runtime" ps -aq --filter "label=CLUSTER_JOB_ID=$name" 2>/dev/null | sed 's/^/container /'
}
[ -z "$port" ] || listener "$port" "$python" &
[ -z "$name" ] || namesakes | sed -n '1s/^/runs /p' &
test -r /proc/self/environ && command -v setsid flock base64 >/dev/null || echo "tools"
[ -z "$dir" ] || can_write "$dir" 2>/dev/null || echo "run_dir $dir"
case $runtime in
none) "$python" -c "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))" 2>/dev/null || echo torch ;;
*)
    if ! command -v "$runtime" >/dev/null; then echo "no_runtime $runtime"
    elif ! why=$("$runtime" version --format '{{.Server.Version}}' 2>&1 >/dev/null); then echo "engine ${why##*$'\n'}"
    elif ! id=$("$runtime" image inspect --format '{{.Id}} {{.Architecture}}' "$image" 2>/dev/null); then echo no_image
    else echo "image $id $(uname -m)"; fi ;;
esac
# nothing listens there yet: a refusal says that the way is open
if [ -n "$master" ]; then
    why=$(timeout 3 bash -c ': < "/dev/tcp/$0/$1"' "${master%:*}" "${master##*:}" 2>&1) || case $why in
        *refused*) ;;
        *) why=${why%%$'\n'*}; echo "no_way $master: $(why=${why##*: }; echo "${why:-no answer within 3 s}")" ;;
    esac
fi
[ -z "$new" ] || ! test -e "$new" || echo "exists $new"
for path; do test -e "$path" || echo "missing $path"; done
if [ "$device" = cuda ]; then
    found=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | tr '\n' ' ')
    for id in ${gpus//,/ }; do case " $found " in *" $id "*) ;; *) echo "no_gpu $id" ;; esac; done
fi
[ -z "$gpus" ] || holders | sed 's/^/held /'
wait
exit 0
"""
)
