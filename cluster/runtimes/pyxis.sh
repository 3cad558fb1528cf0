# shellcheck shell=bash disable=SC2034
# The functions of pyxis: the container is a job step on this node.
prepare() { options=(--nodelist "$SLURMD_NODENAME"); }
prepare_exec() { prepare; }
