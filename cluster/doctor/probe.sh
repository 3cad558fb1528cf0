# shellcheck shell=bash
# Prints the facts of this machine, a line `NAME=VALUE` each; the last one is `probe=end`. It judges none of them. $1 the run
# directory, $2 the runtime, $3 the image, $4 the Python program that prints versions; then the address of every node.
run_dir=$1 runtime=$2 image=$3 versions=$4
shift 4
export LC_ALL=C
# The free and the total space of the disk of $2: in KB ($1 is -k), or in inodes (-i).
room() { df -P "$1" "$2" 2>/dev/null | { read -r _; read -r _ total _ free _; echo "${free:-} ${total:-}"; }; }
has() { command -v "$1" >/dev/null 2>&1 && fact has "$1"; }

fact user "$(id -un)"
fact uid "$(id -u)"
fact groups "$(id -Gn)"
fact arch "$(uname -m)"
fact kernel "$(cat /proc/version)"
while read -r name value _; do [ "$name" = MemTotal: ] && fact memory_kb "$value"; done < /proc/meminfo
fact shm_kb "$(room -k /dev/shm)"
fact nofile "$(ulimit -Hn)"
fact memlock_kb "$(ulimit -l)"
[ -d /run/systemd/system ] && fact has systemd
for tool in ip python3 rsync ufw firewall-cmd; do has "$tool"; done
for folder in /sys/class/infiniband/*; do [ -e "$folder" ] && fact infiniband "${folder##*/}"; done

# The network. The speed of a virtual device is meaningless.
if command -v ip >/dev/null; then
    ip -o addr show up | while read -r _ device _ address _; do fact address "$device $address"; done
fi
for folder in /sys/class/net/*; do
    [ -e "$folder/device" ] && speed=$(cat "$folder/speed" 2>/dev/null) && fact speed "${folder##*/} $speed"
done
for peer; do
    number=$({ getent ahostsv4 "$peer" || getent ahosts "$peer"; } | { read -r number _; echo "$number"; })
    fact number "$peer $number"
    [ -n "$number" ] && fact route "$peer $(ip -o route get "$number" 2>&1)"
done

# The run directory: a file is written in the closest folder that exists, and removed.
case $run_dir in "") run_dir=$HOME/clusterctl/runs ;; \~/*) run_dir=$HOME/${run_dir#\~/} ;; esac
folder=$run_dir
until [ -e "$folder" ]; do folder=$(dirname -- "$folder"); done
fact run_dir "$run_dir"
fact run_disk_kb "$(room -k "$folder")"
fact run_inodes "$(room -i "$folder")"
if why=$({ head -c 65536 /dev/zero > "$folder/.clusterctl-doctor.$$"; } 2>&1); then fact writable "$folder"
else fact unwritable "${why##*: }"; fi
rm -f -- "$folder/.clusterctl-doctor.$$"

# The engine, the image and the containers of jobs. Lines of the input that are no fact `$1_...=...` are the engine's
# message: they become facts `$1_says`.
engine_facts() {
    while IFS= read -r line; do
        case $line in "$1"_*=*) echo "$line" ;; ?*) fact "$1_says" "$line" ;; esac
    done
}
nl='{{"\n"}}'
case $runtime in
docker)
    about="engine_version={{.ServerVersion}}${nl}engine_root={{.DockerRootDir}}"
    about="$about${nl}engine_security={{.SecurityOptions}}"
    about="$about${nl}engine_runtimes={{range \$name, \$_ := .Runtimes}}{{\$name}} {{end}}"
    about="$about${nl}engine_store={{.DriverStatus}}"
    job='{{.Label "CLUSTER_JOB_ID"}}' ;;
podman)
    about="engine_version={{.Version.Version}}${nl}engine_root={{.Store.GraphRoot}}"
    about="$about${nl}engine_security={{if .Host.Security.Rootless}}rootless{{end}}"
    job='{{index .Labels "CLUSTER_JOB_ID"}}' ;;
esac
if [ "$runtime" = none ]; then
    command -v python3 >/dev/null && python3 -c "$versions" 2>/dev/null < /dev/null
elif has "$runtime"; then
    info=$(timeout 15 "$runtime" info --format "$about" 2>&1 < /dev/null)
    [ $? = 124 ] && info="no answer within 15 s"
    engine_facts engine <<< "$info"
    root=$(sed -n 's/^engine_root=//p' <<< "$info")
    [ -n "$root" ] && fact engine_disk_kb "$(room -k "$root")"
fi
if [ -n "${root:-}" ]; then
    if [ -n "$image" ]; then
        about="image_id={{.Id}}${nl}image_arch={{.Architecture}}${nl}image_layers={{.RootFS.Layers}}"
        timeout 15 "$runtime" image inspect --format "$about" -- "$image" 2>&1 < /dev/null | engine_facts image
    fi
    about="container=$job {{.Names}}"
    timeout 15 "$runtime" ps -a --filter label=CLUSTER_JOB_ID --format "$about" 2>/dev/null < /dev/null
fi

# The jobs that have processes
grep -hzs '^CLUSTER_JOB_ID=' /proc/[0-9]*/environ | tr '\0' '\n' | sort -u |
    while IFS= read -r line; do fact process "${line#*=}"; done

# GPUs
smi=$(command -v nvidia-smi || ls /usr/lib/wsl/lib/nvidia-smi 2>/dev/null)
if [ -n "$smi" ]; then
    fact has nvidia-smi
    query=index,driver_version,memory.total,memory.used,name
    found=$(timeout 20 "$smi" --query-gpu=$query --format=csv,noheader,nounits 2>&1 < /dev/null)
    code=$?
    while IFS= read -r line; do
        if [ "$code" = 0 ]; then fact gpu "$line"; elif [ -n "$line" ]; then fact gpu_says "$line"; fi
    done <<< "$found"
fi
for tool in nvidia-ctk nvidia-container-runtime-hook; do has "$tool"; done
for file in /etc/cdi/*nvidia* /var/run/cdi/*nvidia*; do [ -e "$file" ] && fact cdi "$file"; done

# Windows Subsystem for Linux
case $(cat /proc/version) in *[Mm]icrosoft*)
    fact wsl_networking "$(wslinfo --networking-mode 2>/dev/null | tr -d '\r')"
    file=/usr/lib/wsl/lib/libcuda.so.1
    [ -e "$file" ] && fact libcuda "$file" ;;
esac
echo probe=end
