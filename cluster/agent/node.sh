# shellcheck shell=bash disable=SC2154
# The rest of a node's script: it enters the container, and keeps the exit code. The lines above it set `runtime`, `enter`
# and `arguments` (the command, before and after the runtime's options), for Apptainer also `names` (of the variables that
# the container gets).

out="$CLUSTER_RUN_DIR/attempt-$CLUSTER_ATTEMPT"
mkdir -p -- "$out" || exit 73
rm -f -- "$out/$CLUSTER_NODE".{exit,json,alive}
printf '%s\n' "$$" > "$out/$CLUSTER_NODE.pid" || exit 73

# Write the exit code $1 and leave; a full disk leaves no half of a file.
end() {
    local partial="$out/$CLUSTER_NODE.exit.tmp"
    if printf '%d %s\n' "$1" "$(date +%s.%N)" > "$partial"; then mv -- "$partial" "${partial%.tmp}"; fi
    rm -f -- "$partial"
    exit "$1"
}
fail() {
    echo "error: $CLUSTER_NODE: $1" | tee -- "$out/$CLUSTER_NODE.err" >&2
    end 71
}

# Secrets are in no plan. A file that only its owner can read has them, or the environment of this script.
for file in "$out/$CLUSTER_NODE.secrets" "$CLUSTER_RUN_DIR/secrets"; do
    # shellcheck disable=SC1090
    [ ! -e "$file" ] || . "$file"
done
rm -f -- "$out/$CLUSTER_NODE.secrets"
secrets=${CLUSTER_SECRETS:-}
for name in ${secrets//,/ }; do
    [ -n "${!name+set}" ] || fail "the secret $name has no value: export $name"
done

# The runtime's options that depend on the machine
options=()
rootless=
case $runtime in
docker)
    options=(--user "$(id -u):$(id -g)")
    # In a rootless engine root is the caller outside.
    case $(docker info --format '{{.SecurityOptions}}' 2>/dev/null) in
        *rootless*) rootless=yes options=(--user 0:0) ;;
    esac ;;
podman)
    options=(--user "$(id -u):$(id -g)")
    [ "$(id -u)" = 0 ] || { rootless=yes; options+=(--userns keep-id); } ;;
pyxis)
    options=(--nodelist "$SLURMD_NODENAME") ;;
apptainer)
    # Only these variables enter the container, and no value is on a command line.
    for name in "${names[@]}"; do [ -z "${!name+set}" ] || export "APPTAINERENV_$name=${!name}"; done ;;
esac
case $runtime in
docker | podman)
    # RDMA and NCCL want memory that stays in place. Only an engine that may raise limits (bit 24) can give it.
    [ ! -d /dev/infiniband ] || options+=(--device /dev/infiniband)
    rights=$(sed -n 's/^CapBnd:[[:space:]]*//p' /proc/self/status)
    if [ -z "$rootless" ] && [ $((0x${rights:-0} >> 24 & 1)) = 1 ]; then
        options+=(--ulimit memlock=-1 --ulimit stack=67108864)
    fi
    # GPUs that a scheduler gave: a container counts them from 0.
    if [ -n "${GIVEN_GPUS:-}" ]; then
        IFS=, read -r -a gpus <<< "$GIVEN_GPUS"
        if [ "$runtime" = docker ]; then options+=(--gpus "\"device=$GIVEN_GPUS\"")
        else for gpu in "${gpus[@]}"; do options+=(--device "nvidia.com/gpu=$gpu"); done; fi
        export CUDA_VISIBLE_DEVICES
        CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((${#gpus[@]} - 1)))
    fi
    # The agent in the container stops the ranks when this file does not change any more.
    echo 0 > "$out/$CLUSTER_NODE.alive"
    (
        trap '' TERM INT USR2
        count=0
        while sleep 2 && kill -0 "$$" 2>/dev/null; do echo $((count += 1)) > "$out/$CLUSTER_NODE.alive"; done
    ) > /dev/null 2>&1 &
    alive=$! ;;
esac

# Apptainer does not pass signals on; the agent's process is one of this machine.
# shellcheck disable=SC2317,SC2329
forward() {
    local target=$child
    [ "$runtime" != apptainer ] || target=$(sed -n 's/.*"pid":\([0-9]*\),"started_at".*/\1/p' "$out/$CLUSTER_NODE.json")
    kill -s "$1" "${target:-$child}" 2>/dev/null
}
trap '' USR2
"${enter[@]}" "${options[@]}" "${arguments[@]}" 2> "$out/$CLUSTER_NODE.err" &
child=$!
trap 'forward TERM' TERM INT
trap 'forward USR2' USR2
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do # a signal ends `wait` before the child has ended
    wait "$child"
    code=$?
done
wait "$child" 2>/dev/null # and once more, where both came at once: 127 means that its code is known
last=$?
[ "$last" = 127 ] || code=$last
[ -z "${alive:-}" ] || kill -KILL "$alive" 2>/dev/null
end "$code"
