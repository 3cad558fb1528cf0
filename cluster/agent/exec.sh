# shellcheck shell=bash disable=SC2154,SC2034
# exec and shell: enters a node's container and runs the command "$@" there. Variables: `out` (the attempt's folder), `node`,
# `engine` (that keeps the container, or ""), `inside` (1 without a container), and the arrays `enter` and `arguments`, the
# words before the command, before and after the runtime's options. The runtime's functions are above it.
fail() { echo "error: $node: $1" >&2; exit 71; }

read -r pid phase 2>/dev/null < "$out/$node.agent" || fail "its ranks have not started"
[ "$phase" != exited ] || fail "its ranks have ended"

# Whether the process $1 is the agent of the node $3 in the attempt's folder $2.
is_agent() {
    local word
    [[ $1 =~ ^[1-9][0-9]*$ ]] || return 1
    grep -qz '/agent\.pyz$' "/proc/$1/cmdline" || return 1
    for word in "CLUSTER_RUN_DIR=${2%/attempt-*}" "CLUSTER_ATTEMPT=${2##*/attempt-}" "CLUSTER_NODE=$3"; do
        grep -qzxF -- "$word" "/proc/$1/environ" || return 1
    done
} 2>/dev/null
options=() site=()
# An engine finds the container by its name.
if [ -z "$engine" ]; then
    # The variables of the agent, whose pid is valid on the host. A container has its own PATH.
    names=()
    # After the agent's death its pid may be another process's, also a rank's.
    is_agent "$pid" "$out" "$node" || fail "its agent does not run on $(hostname)"
    while IFS= read -r -d '' variable; do
        case $inside:$variable in
        1:*) export "${variable?}" 2>/dev/null ;;
        *:PATH=* | *:LD_LIBRARY_PATH=* | *:HOME=*) ;;
        *) export "${variable?}" 2>/dev/null && names+=("${variable%%=*}") ;;
        esac
    done < "/proc/$pid/environ"
    [ "$inside" = 0 ] || cd -P -- "/proc/$pid/cwd" || exit 72
    [ "$(type -t prepare_exec)" != function ] || prepare_exec
fi
exec "${enter[@]}" "${options[@]}" "${arguments[@]}" "$@"
