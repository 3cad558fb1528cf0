# shellcheck shell=bash disable=SC2154,SC2034
# The functions of apptainer.
# Only the variables `names` and `site` enter the container, and no value is on a command line.
prepare() {
    local name
    for name in "${names[@]}" "${site[@]}"; do [ -z "${!name+set}" ] || export "APPTAINERENV_$name=${!name}"; done
}
# The exit code if Apptainer cannot start the container
start_failure=255
# Apptainer does not forward signals, but the agent's pid is valid on the host.
signal_pid() { agent_pid; }
prepare_exec() { prepare; }
