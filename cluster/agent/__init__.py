"""Programs that run on a node, or on the login node of a Slurm cluster.

local and ssh: check.sh (preflight), queue.sh (launch --wait), start.sh, node.sh, agent.pyz, poll.sh, stop.sh,
orphans.sh.
slurm: slurm_check.sh, slurm_submit.sh or slurm_array.sh, batch.sh, slurm_node.sh, node.sh, agent.pyz, slurm_poll.sh,
slurm_cancel.sh. common.sh has functions that they share.
"""
