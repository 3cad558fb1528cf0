"""The one look at a node: a bash text prints what is there as `key=value` lines, and nothing of it is judged here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.errors import UnreachableError
from cluster.model import Node
from cluster.shells import reach

TIMEOUT_S = 45.0

# Read with importlib and as text: importing torch would take seconds.
VERSIONS = """
import importlib.metadata, importlib.util, pathlib, re, sys
print(f"python={sys.version.split()[0]}")
for found in importlib.metadata.distributions():
    name = (found.metadata["Name"] or "").lower()
    if name == "torch":
        print(f"torch={found.version}")
    elif name.startswith("nvidia-nccl"):
        print(f"nccl={found.version}")
spec = importlib.util.find_spec("torch")
file = pathlib.Path(spec.origin).with_name("version.py") if spec and spec.origin else None
if file and file.is_file():
    for name, value in re.findall(r"^(cuda|hip)\\b[^=]*= *'([^']+)'", file.read_text(), re.M):
        print(f"{name}={value}")
"""

#: `$1` run_dir, `$2` runtime, `$3` image, `$4` a python program, then every node's address.
TEXT = r"""
run_dir=$1 runtime=$2 image=$3 versions=$4
shift 4
export LC_ALL=C
say() { printf '%s=%s\n' "$1" "${2//$'\n'/ }"; }
room() { df -P "$1" "$2" 2>/dev/null | { read -r _; read -r _ total _ left _; echo "${left:-} ${total:-}"; }; }
has() { command -v "$1" >/dev/null 2>&1 && say has "$1"; }
say user "$(id -un)"; say uid "$(id -u)"; say groups "$(id -Gn)"
say arch "$(uname -m)"; say kernel "$(cat /proc/version)"
while read -r name value _; do [ "$name" = MemTotal: ] && say memory_kb "$value"; done < /proc/meminfo
say shm_kb "$(room -k /dev/shm)"
say nofile "$(ulimit -Hn)"; say memlock_kb "$(ulimit -l)"
[ -d /run/systemd/system ] && say has systemd
for tool in ip python3 rsync ufw firewall-cmd; do has "$tool"; done
for folder in /sys/class/infiniband/*; do [ -e "$folder" ] && say infiniband "${folder##*/}"; done

# network
if command -v ip >/dev/null; then
    ip -o addr show up | while read -r _ device _ address _; do say address "$device $address"; done
fi
for folder in /sys/class/net/*; do
    # a virtual device says a number that means nothing
    [ -e "$folder/device" ] && speed=$(cat "$folder/speed" 2>/dev/null) && say speed "${folder##*/} $speed"
done
for peer; do
    number=$({ getent ahostsv4 "$peer" || getent ahosts "$peer"; } | { read -r number _; echo "$number"; })
    say number "$peer $number"
    [ -n "$number" ] && say route "$peer $(ip -o route get "$number" 2>&1)"
done

# the run directory: the nearest folder that is there takes a file
case $run_dir in "" ) run_dir=$HOME/clusterctl/runs ;; "~/"*) run_dir=$HOME/${run_dir#\~/} ;; esac
folder=$run_dir
until [ -e "$folder" ]; do folder=$(dirname -- "$folder"); done
say run_dir "$run_dir"
say run_disk_kb "$(room -k "$folder")"; say run_inodes "$(room -i "$folder")"
if why=$({ head -c 65536 /dev/zero > "$folder/.clusterctl-doctor.$$"; } 2>&1); then say writable "$folder"
else say unwritable "${why##*: }"; fi
rm -f -- "$folder/.clusterctl-doctor.$$"

# runtime, image, what is left of jobs: the engine's own words where it does not give what is asked
lines() {
    while IFS= read -r line; do
        case $line in "$1"_*=*) echo "$line" ;; ?*) say "$1_says" "$line" ;; esac
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
    lines engine <<< "$info"
    root=$(sed -n 's/^engine_root=//p' <<< "$info")
    [ -n "$root" ] && say engine_disk_kb "$(room -k "$root")"
fi
if [ -n "${root:-}" ]; then
    if [ -n "$image" ]; then
        about="image_id={{.Id}}${nl}image_arch={{.Architecture}}${nl}image_layers={{.RootFS.Layers}}"
        timeout 15 "$runtime" image inspect --format "$about" -- "$image" 2>&1 < /dev/null | lines image
    fi
    about="container=$job {{.Names}}"
    timeout 15 "$runtime" ps -a --filter label=CLUSTER_JOB_ID --format "$about" 2>/dev/null < /dev/null
fi
grep -hzs '^CLUSTER_JOB_ID=' /proc/[0-9]*/environ | tr '\0' '\n' | sort -u |
    while IFS= read -r line; do say process "${line#*=}"; done

# GPUs
smi=$(command -v nvidia-smi || ls /usr/lib/wsl/lib/nvidia-smi 2>/dev/null)
if [ -n "$smi" ]; then
    say has nvidia-smi
    query=index,driver_version,memory.total,memory.used,name
    found=$(timeout 20 "$smi" --query-gpu=$query --format=csv,noheader,nounits 2>&1 < /dev/null)
    code=$?
    while IFS= read -r line; do
        if [ "$code" = 0 ]; then say gpu "$line"; elif [ -n "$line" ]; then say gpu_says "$line"; fi
    done <<< "$found"
fi
for tool in nvidia-ctk nvidia-container-runtime-hook; do has "$tool"; done
for file in /etc/cdi/*nvidia* /var/run/cdi/*nvidia*; do [ -e "$file" ] && say cdi "$file"; done

# Windows
case $(cat /proc/version) in *[Mm]icrosoft*)
    say wsl_networking "$(wslinfo --networking-mode 2>/dev/null | tr -d '\r')"
    for file in /usr/lib/wsl/lib/libcuda.so.1 /usr/lib/*-linux-gnu/libcuda.so.1; do
        [ -e "$file" ] && say libcuda "$file"
    done
esac
echo probe=end
"""


@dataclass(frozen=True)
class Facts:
    """What a node said of itself: every key with its values, in the order they came."""

    values: Mapping[str, tuple[str, ...]]

    def text(self, key: str) -> str:
        """The first value, "" where there is none."""
        return self.values.get(key, ("",))[0]

    def every(self, key: str) -> tuple[str, ...]:
        """All values."""
        return self.values.get(key, ())

    def number(self, key: str, nth: int = 0) -> int | None:
        """The nth word of the first value as a number; None where there is none, also for "unlimited"."""
        words = self.text(key).split()
        return int(words[nth]) if len(words) > nth and words[nth].isdigit() else None

    def pairs(self, key: str) -> list[tuple[str, str]]:
        """Every value cut at its first blank."""
        cut = (value.partition(" ") for value in self.every(key))
        return [(first, rest) for first, _, rest in cut]

    def has(self, tool: str) -> bool:
        """Whether the node has this program."""
        return tool in self.every("has")


def parse(text: str) -> Facts:
    """The facts of a probe's output."""
    values: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        key, is_fact, value = line.partition("=")
        if is_fact and value.strip():
            values[key] = (*values.get(key, ()), value.strip())
    return Facts(values)


def look(node: Node, image: str, addresses: Sequence[str]) -> Facts:
    """What is on a node; raises UnreachableError when it cannot be reached or has no bash."""
    argv = ["bash", "-c", TEXT, "probe", node.run_dir, node.runtime, image, VERSIONS, *addresses]
    done = reach(node).run(argv, timeout_s=TIMEOUT_S)
    facts = parse(done.out)
    if "end" not in facts.every("probe"):
        raise UnreachableError(
            f"{node.name}: commands do not run there: {done.last_line}",
            f'try by hand: ssh {node.login} "bash --version"',
        )
    return facts
