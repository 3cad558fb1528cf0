# shellcheck shell=bash
# Prints the facts of a Slurm cluster's login node, a line `NAME=VALUE` each; the last one is `probe=end`. $1 the run
# directory, $2 the data directory ("": the default of each), then the programs that are needed. It makes no folder: it
# checks the closest one that exists.
folder() {
    local path=$2 existing
    case $path in "") path=$HOME/clusterctl/$3 ;; \~/*) path=$HOME/${path#\~/} ;; esac
    existing=$path
    until [ -d "$existing" ]; do existing=$(dirname -- "$existing"); done
    fact "$1" "$path"
    fact "nearest_$1" "$existing"
    [ -w "$existing" ] || fact unwritable "$1"
}
folder run_dir "$1" runs
folder data_dir "$2" data
shift 2
for program; do command -v "$program" >/dev/null && fact has "$program"; done
fact ping "$(timeout 20 scontrol ping 2>&1 < /dev/null)"
echo probe=end
