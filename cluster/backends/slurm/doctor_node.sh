# shellcheck shell=bash disable=SC2154
# doctor_node.sh RUN_FILE DATA_FILE
# Prints the facts of a node in a Slurm job as lines `NAME=VALUE`. The text of checks/probe.sh follows this text. The array
# `version` is the command that prints the runtime's version, and `check` runs `true` in the image. The two files are those
# of doctor_job.sh.

# The peer of the first node is the second one; the peer of every other node is the first one.
echo "host=${SLURMD_NODENAME:-$(hostname)}"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
peer=${hosts[$((SLURM_NODEID == 0))]:-}
echo "peer=$peer"
[ ! -e "$1" ] || echo "common=run_dir"
[ ! -e "$2" ] || echo "common=data_dir"
echo "visible_gpus=${CUDA_VISIBLE_DEVICES:-}"
if [ ${#version[@]} -gt 0 ] && text=$("${version[@]}" 2>/dev/null < /dev/null); then
    echo "runtime_version=${text%%$'\n'*}"
    if [ ${#check[@]} -gt 0 ] && ! why=$(timeout 60 "${check[@]}" 2>&1 < /dev/null); then
        why=${why##*$'\n'}
        echo "image_says=${why:-timed out after 60 s}"
    fi
fi
set -- ${peer:+"$peer"}
