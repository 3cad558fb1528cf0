# shellcheck shell=bash
# The environment of Slurm's programs. sbatch, srun, squeue and the others read options from variables that a surrounding
# job, a profile or the user sets, and each version adds some. They are found by their prefix.

# The names of these variables, except those that say where the cluster is, and those that match a pattern of the arguments.
slurm_variables() {
    local name pattern
    for name in "${!SLURM@}" "${!_SLURM@}" "${!SPANK_@}" "${!SBATCH_@}" "${!SRUN_@}" "${!SALLOC_@}" "${!SQUEUE_@}" \
        "${!SACCT_@}" "${!SINFO_@}" "${!SCANCEL_@}" "${!SCONTROL_@}" "${!PMI_@}"; do
        case $name in SLURM_CONF | SLURM_CONF_SERVER | SLURM_JWT | SLURM_SACK_*) continue ;; esac
        for pattern; do
            # shellcheck disable=SC2254
            case $name in $pattern) continue 2 ;; esac
        done
        echo "$name"
    done
}
# Prints them as lines `inherited NAME=VALUE`.
report_slurm() {
    local name
    for name in $(slurm_variables); do printf 'inherited %s=%s\n' "$name" "${!name//[[:cntrl:]]/ }"; done
}
clear_slurm() {
    local name
    for name in $(slurm_variables "$@"); do unset -v "$name"; done
}
