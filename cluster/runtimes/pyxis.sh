# shellcheck shell=bash disable=SC2034,SC2154
# The functions of pyxis: the container is a job step on this node. Without --container-env the image's values would win.
prepare() {
    local IFS=, all=("${names[@]}" "${site[@]}")
    options=(--nodelist "$SLURMD_NODENAME" "--container-env=${all[*]}")
}
prepare_exec() { prepare; }
