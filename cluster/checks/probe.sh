# shellcheck shell=bash disable=SC2154
# Prints the facts of this machine as lines `NAME=VALUE`. The last one is `probe=end`. The arguments are the addresses of all
# nodes. Variables: `run_dir`, `engine` and `image`, `info` (a Go template of the engine, if there is one),
# `versions` (the text of versions.py), and the array `python`, the command that runs Python in the image.
export LC_ALL=C
fact() { printf '%s=%s\n' "$1" "${2//$'\n'/ }"; }
has() { command -v "$1" >/dev/null 2>&1 && fact has "$1"; }
# Prints the free and the total space of the disk of $1, in KB.
room() { df -Pk "$1" 2>/dev/null | { read -r _; read -r _ total _ free _; echo "${free:-} ${total:-}"; }; }

fact user "$(id -un)"
fact uid "$(id -u)"
fact arch "$(uname -m)"
fact kernel "$(cat /proc/version)"
fact shm_kb "$(room /dev/shm)"
fact nofile "$(ulimit -Hn)"

# Network
if command -v ip >/dev/null; then
    ip -o addr show up | while read -r _ device _ address _; do fact address "$device $address"; done
fi
for peer; do
    number=$({ getent ahostsv4 "$peer" || getent ahosts "$peer"; } | { read -r number _; echo "$number"; })
    fact number "$peer $number"
    [ -n "$number" ] && fact route "$peer $(ip -o route get "$number" 2>&1)"
done

# Run directory: write a file into the closest existing parent, and remove it.
case $run_dir in "") run_dir=$HOME/clusterctl/runs ;; \~/*) run_dir=$HOME/${run_dir#\~/} ;; esac
folder=$run_dir
until [ -e "$folder" ]; do folder=$(dirname -- "$folder"); done
fact run_dir "$run_dir"
fact run_disk_kb "$(room "$folder")"
why=$({ head -c 65536 /dev/zero > "$folder/.clusterctl-doctor.$$"; } 2>&1) || fact unwritable "${why##*: }"
rm -f -- "$folder/.clusterctl-doctor.$$"

# Engine and image. Messages of the engine are facts `engine_says`.
if [ -n "$engine" ]; then
    inside=("${python[@]}")
    python=()
    if has "$engine"; then
        found=$(timeout 15 "$engine" info --format "$info" 2>&1 < /dev/null)
        [ $? = 124 ] && found="no answer within 15 s"
        while IFS= read -r line; do
            case $line in engine_*=*) echo "$line" ;; ?*) fact engine_says "$line" ;; esac
        done <<< "$found"
        if grep -q '^engine_version=.' <<< "$found"; then
            about='image_id={{.Id}}{{"\n"}}image_arch={{.Architecture}}'
            timeout 15 "$engine" image inspect --format "$about" -- "$image" 2>/dev/null < /dev/null
            python=("${inside[@]}")
        fi
    fi
fi
[ ${#python[@]} = 0 ] || timeout 30 "${python[@]}" -c "$versions" 2>/dev/null < /dev/null

# GPUs
has nvidia-ctk
if has nvidia-smi; then
    query=index,driver_version,memory.total,memory.used,name
    found=$(timeout 20 nvidia-smi --query-gpu=$query --format=csv,noheader,nounits 2>&1 < /dev/null)
    code=$?
    while IFS= read -r line; do
        if [ "$code" = 0 ]; then fact gpu "$line"; elif [ -n "$line" ]; then fact gpu_says "$line"; fi
    done <<< "$found"
    while IFS= read -r line; do fact listed "$line"; done < <(timeout 20 nvidia-smi -L 2>/dev/null < /dev/null)
fi

[ ! -d /dev/infiniband ] || fact infiniband yes

# Windows Subsystem for Linux
case $(cat /proc/version) in *[Mm]icrosoft*)
    fact wsl_networking "$(wslinfo --networking-mode 2>/dev/null | tr -d '\r')"
    file=/usr/lib/wsl/lib/libcuda.so.1
    [ -e "$file" ] && fact libcuda "$file" ;;
esac
echo probe=end
