"""Finds the machines: the inventory that options or the current folder name, and what the machines themselves have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster import addresses, config, fanout, inventory, resources
from cluster.errors import ClusterError, LaunchError, UsageError
from cluster.model import Inventory, Node
from cluster.shells import reach

DEFAULT_FILE = "cluster.yaml"

_TIMEOUT_S = 45.0


@dataclass(frozen=True)
class Found:
    """What a machine has: `node` is complete, `notes` are what to know.

    `network` is the device that has the address, `why` tells why it is that one. `gpus` are their models, `engine` is
    the runtime with its version, or why there is none.
    """

    node: Node
    hostname: str
    gpus: tuple[str, ...]
    engine: str
    free_gb: float
    network: str
    why: str
    notes: tuple[str, ...] = ()


@dataclass
class _Seen:
    """One machine's answer."""

    said: Mapping[str, str]
    addresses: tuple[addresses.Address, ...]
    gpus: dict[int, str]
    runtime: str
    engine: str
    notes: list[str] = field(default_factory=list)


def load(
    path: str = "",
    hosts: str = "",
    hostfile: str = "",
    ssh_config: str = "",
    only: str = "",
    cwd: str = "",
    backend: str = "auto",
) -> Inventory | None:
    """The inventory of a cluster.yaml, of `a,b` or of a hostfile; by default of `cluster.yaml` in `cwd`.

    None where nothing is named and there is no such file, or where `backend` is one of this machine: that is meant.
    Only files are read; see `complete`.
    Raises UsageError for what is not there, says nothing, or excludes each other.
    """
    given = {"--inventory": path, "--hosts": hosts, "--hostfile": hostfile}
    named = [option for option, value in given.items() if value]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} exclude each other", "they are three ways to name the machines")
    if backend in config.ON_THIS_MACHINE:
        for option, value in {**given, "--ssh-config": ssh_config, "--only": only}.items():
            if value:
                raise UsageError(f"--backend {backend} is this machine, and {option} names others", "leave one out")
        return None
    here = Path(cwd) if cwd else Path.cwd()
    if not named and not (here / DEFAULT_FILE).exists():
        if only or ssh_config:
            option = "--only" if only else "--ssh-config"
            raise UsageError(f"{option}: there is no {DEFAULT_FILE} in this folder", "name it with --inventory FILE")
        return None
    if hosts:
        found = inventory.from_hosts(hosts)
    elif hostfile:
        found = inventory.from_hostfile(_text(here, hostfile, "--hostfile"), hostfile)
    else:
        found = inventory.from_yaml(_text(here, path or DEFAULT_FILE, "--inventory"), path or DEFAULT_FILE, str(here))
    if ssh_config:
        absolute = str(here / Path(ssh_config).expanduser())
        found = replace(found, nodes=tuple(replace(node, ssh_config=absolute) for node in found.nodes))
    for file in {node.ssh_config for node in found.nodes if node.ssh_config}:
        _text(here, file, "--ssh-config" if ssh_config else f"{found.path}: ssh_config")
    return inventory.only(found, only) if only else found


def complete(found: Inventory) -> Inventory:
    """The inventory with what its text leaves open looked for on the machines, all at once; `look`'s errors."""
    if inventory.is_complete(found):
        return found
    if found.backend == "slurm":  # a login node has no GPU, and need not
        return replace(found, nodes=tuple(each.node for each in look(replace(found, device="any")).values()))
    return replace(found, nodes=tuple(each.node for each in look(found).values()))


def look(asked: Inventory) -> dict[str, Found]:
    """What every machine has, by its node's name; what `asked` says of a node is kept.

    Raises one ClusterError that names every machine that does not answer or cannot be used as it is.
    """
    needs_gpus = asked.device == "cuda"
    seen = fanout.all_of(asked.nodes, lambda node: _seen(node, needs_gpus=needs_gpus))
    open_ = [node for node in asked.nodes if not node.address]
    chosen = _addresses(asked.nodes, seen) if open_ else {}
    runtimes = {node.name: node.runtime or seen[node.name].runtime for node in asked.nodes}
    _refuse_mixed(runtimes, seen)
    made = {}
    for node in asked.nodes:
        of = seen[node.name]
        choice = chosen.get(node.name) if not node.address else None
        notes = [*of.notes, *([choice.warning] if choice and choice.warning else [])]
        if runtimes[node.name] == "none" and not node.runtime:
            notes.append(f"{of.engine}: jobs run without a container, with the machine's own python3")
        made[node.name] = Found(
            node=replace(
                node,
                address=choice.address.number if choice else node.address,
                gpus=node.gpus or tuple(of.gpus),
                run_dir=of.said["run_dir"],
                data_dir=of.said["data_dir"],
                runtime=runtimes[node.name],
            ),
            hostname=of.said["hostname"],
            gpus=tuple(of.gpus.values()),
            engine=of.engine,
            free_gb=_free_gb(of.said["run_dir.disk"]),
            network=choice.address.device if choice else "",
            why=choice.why if choice else "as given",
            notes=tuple(notes),
        )
    return made


def _script(*words: str) -> list[str]:
    return ["bash", "-c", resources.text("discovery.sh"), "discovery", *words]


def _seen(node: Node, *, needs_gpus: bool) -> _Seen:
    folders = (node.run_dir or inventory.RUN_DIR, node.data_dir or inventory.DATA_DIR)
    done = reach(node).run(_script("machine", *folders), timeout_s=_TIMEOUT_S)
    if done.code:
        raise LaunchError(f"{node.name}: cannot look at it: {done.last_line}", "it needs bash and the usual tools")
    words = done.out.split("\0")
    said = dict(zip(words[0::2], words[1::2], strict=False))
    for name in ("run_dir", "data_dir"):
        if said[f"{name}.writable"] != "yes":
            raise LaunchError(
                f"{node.name}: {name} {said[name]}: {said['user']} may not write in {said[f'{name}.there']}",
                f"another --{name.replace('_', '-')}, or there: sudo install -d -o {said['user']} {said[name]}",
            )
    speeds = {name[6:]: int(value) for name, value in said.items() if name[:6] == "speed " and value.isdigit()}
    if not node.address and "inet" not in said["addresses"]:
        raise LaunchError(
            f"{node.name}: cannot see its addresses: {said['addresses'].strip() or 'none'}", "apt-get install iproute2"
        )
    gpus, notes = _gpus(node, said, needed=needs_gpus)
    runtime, engine = _runtime(node, said)
    return _Seen(said, addresses.addresses(said["addresses"], speeds), gpus, runtime, engine, notes)


def _gpus(node: Node, said: Mapping[str, str], *, needed: bool) -> tuple[dict[int, str], list[str]]:
    """The machine's GPUs by id, and what to know."""
    if said.get("gpus_code", "0") != "0":
        last = (said["gpus"].strip().splitlines() or ["no answer in 10 s"])[-1]
        if needed:
            raise LaunchError(
                f"{node.name}: nvidia-smi fails: {last}",
                "mend its driver, or --device cpu (in cluster.yaml: device: cpu)",
            )
        return {}, [f"nvidia-smi fails: {last}"]
    found = {
        int(number): model
        for number, model in re.findall(r"(?m)^GPU (\d+): (.*?)(?: \(UUID.*)?$", said.get("gpus", ""))
    }
    missing = [str(each) for each in node.gpus if each not in found]
    if found and missing:
        raise LaunchError(f"{node.name}: no GPU {', '.join(missing)}: it has {len(found)}", "fewer gpus (slots) for it")
    return found, []


def _runtime(node: Node, said: Mapping[str, str]) -> tuple[str, str]:
    """docker if it answers, else podman, else none; and what to call that."""
    answers = {name: re.search(r"(?m)^answers (\d\S*) (.*)", said.get(name, "")) for name in ("docker", "podman")}
    for name, match in answers.items():
        if match:
            return name, f"{name} {match[1]}{' rootless' if re.search('rootless(?!=false)', match[2]) else ''}"
    if not node.runtime and re.search(r"(?i)permission denied.* (socket|daemon)", said.get("docker", "")):
        raise LaunchError(
            f"{node.name}: {said['user']} may not use its Docker Engine",
            f"there: sudo usermod -aG docker {said['user']} (and log in anew), or --runtime none",
        )
    if "docker" in said or "podman" in said:
        name = "docker" if "docker" in said else "podman"
        words = [line for line in said[name].splitlines() if line.strip() and not line.startswith("answers")]
        return "none", f"{name} does not answer ({words[-1].strip() if words else 'silent for 10 s'})"
    return "none", "neither docker nor podman is there"


def _refuse_mixed(runtimes: Mapping[str, str], seen: Mapping[str, _Seen]) -> None:
    without = [name for name, runtime in runtimes.items() if runtime == "none"]
    if without and len(without) < len(runtimes):
        engine = next(runtime for runtime in runtimes.values() if runtime != "none")
        raise LaunchError(
            "\n       ".join(f"{name}: {seen[name].engine}" for name in without),
            f"the other nodes have {engine}: start it there, leave the machine out, or --runtime none for all",
        )


def _addresses(nodes: tuple[Node, ...], seen: Mapping[str, _Seen]) -> dict[str, addresses.Choice]:
    """Ask every machine for its route to every address of the others, and choose."""
    numbers = {name: [each.number for each in addresses.candidates(of.addresses)] for name, of in seen.items()}

    def routes(node: Node) -> dict[str, addresses.Route]:
        wanted = [number for name, theirs in numbers.items() if name != node.name for number in theirs]
        done = reach(node).run(_script("routes", *wanted), timeout_s=_TIMEOUT_S)
        words = done.out.split("\0")
        return {number: addresses.route(text) for number, text in zip(words[0::2], words[1::2], strict=False)}

    known = fanout.all_of(nodes, routes) if len(nodes) > 1 else {nodes[0].name: {}}
    logins = {name: (of.said["ssh"].split() + [""] * 4)[2] for name, of in seen.items()}
    return addresses.choose({name: of.addresses for name, of in seen.items()}, known, logins)


def _free_gb(text: str) -> float:
    match = re.search(r"\s\d+\s+\d+\s+(\d+)\s+\d+%", text)
    return int(match[1]) / 1e6 * 1.024 if match else 0.0


def device(found: Mapping[str, Found], asked: str) -> str:
    """`cuda` where every node has GPUs, `cpu` where none has; raises ClusterError where only some have."""
    without = [name for name, each in found.items() if not each.gpus]
    if asked != "auto":
        if asked == "cuda" and without:
            raise ClusterError(f"no GPU on {', '.join(without)}", "their drivers (nvidia-smi), or --device cpu")
        return asked
    if without and len(without) < len(found):
        others = [name for name in found if name not in without]
        raise ClusterError(
            f"no GPU on {', '.join(without)}, but on {', '.join(others)}",
            f"leave them out: clusterctl init {' '.join(others)}; or --device cpu for all",
        )
    return "cpu" if without else "cuda"


def _text(here: Path, path: str, option: str) -> str:
    try:
        return (here / Path(path).expanduser()).read_text()
    except UnicodeDecodeError:
        raise UsageError(f"{option} {path}: not a text file") from None
    except OSError as error:
        hint = "clusterctl init gpu-a gpu-b writes one" if option == "--inventory" else ""
        raise UsageError(f"{option} {path}: {error.strerror}", hint) from None
