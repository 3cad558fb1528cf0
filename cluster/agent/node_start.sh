# shellcheck shell=bash disable=SC2154
# The beginning of a node's script, before the job's own lines: records its process id, and defines how it ends.

# agent/node.sh evaluates it. The lines' programs need no secrets.
[ -z "${CLUSTER_SECRET_VALUES:-}" ] || export -n CLUSTER_SECRET_VALUES
out="$CLUSTER_RUN_DIR/attempt-$CLUSTER_ATTEMPT"
mkdir -p -- "$out" || exit 73
rm -f -- "$out/$CLUSTER_NODE".{exit,json,agent,alive}
printf '%s\n' "$$" > "$out/$CLUSTER_NODE.pid" || exit 73

# Writes the exit code $1 atomically, and exits.
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
