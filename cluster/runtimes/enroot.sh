# shellcheck shell=bash disable=SC2154
# The functions of enroot.
# Only the variables `names` and `site` enter the container, and no value is on a command line.
prepare() {
    local name
    for name in "${names[@]}" "${site[@]}"; do [ -z "${!name+set}" ] || options+=(--env "$name"); done
}
# The agent's pid is valid on the host.
signal_pid() { agent_pid; }
prepare_exec() { options=("$pid"); }
