# shellcheck shell=bash disable=SC2034
# What batch/node.sh, which follows, needs to know of a node of Slurm.
scheduler=Slurm rank=$SLURM_NODEID host_gpus=${SLURM_STEP_GPUS:-}
