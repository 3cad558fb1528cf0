# shellcheck shell=bash disable=SC2034
# The step of Slurm is for this node.
prepare() { options=(--nodelist "$SLURMD_NODENAME"); }
prepare_exec() { prepare; }
