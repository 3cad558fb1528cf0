# shellcheck shell=bash
# slurm_node.sh VERSION CHECK ARGUMENT... RUN_FILE DATA_FILE
# Prints the facts of a node in a Slurm job as lines `NAME=VALUE`. The text of probe.sh follows this text and gets the seven
# arguments. VERSION is the command that prints the runtime's version, and CHECK runs `true` in the image. The two files are
# those of slurm_job.sh.
version=() check=()
eval "version=($1)"
eval "check=($2)"

# The peer of the first node is the second one; the peer of every other node is the first one.
echo "host=${SLURMD_NODENAME:-$(hostname)}"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
peer=${hosts[$((SLURM_NODEID == 0))]:-}
echo "peer=$peer"
[ ! -e "${10}" ] || echo "common=run_dir"
[ ! -e "${11}" ] || echo "common=data_dir"
echo "visible_gpus=${CUDA_VISIBLE_DEVICES:-}"
if [ ${#version[@]} -gt 0 ] && text=$("${version[@]}" 2>/dev/null < /dev/null); then
    echo "runtime_version=${text%%$'\n'*}"
    if [ ${#check[@]} -gt 0 ] && ! why=$(timeout 60 "${check[@]}" 2>&1 < /dev/null); then
        why=${why##*$'\n'}
        echo "image_says=${why:-timed out after 60 s}"
    fi
fi
set -- "${@:3:7}" ${peer:+"$peer"}
