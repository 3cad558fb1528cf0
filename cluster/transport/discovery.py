"""Discovery: reads the inventory, and completes it with addresses, GPUs and runtimes of the machines."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster.agent import scripts
from cluster.errors import ClusterError, LaunchError, UsageError
from cluster.runtimes import BARE, DOCKER, ENGINES
from cluster.spec import addresses, inventory
from cluster.spec.model import Gpu, Inventory, Machine
from cluster.spec.traits import Table, on_this_machine
from cluster.transport import nvidia_smi, parallel, reach

DEFAULT_FILE = "cluster.yaml"

_SCRIPT = "transport/discovery.sh"
_TIMEOUT_S = 45.0


@dataclass
class InspectedMachine:
    """Facts about a machine: the completed `machine`, and `notes` for the user.

    `network` is the device of the address, `gpus` are model names by id, `engine` is the runtime with its version, or
    the reason why none is available. `login` is the address of the SSH connection.
    """

    machine: Machine
    hostname: str
    gpus: dict[Gpu, str]
    engine: str
    free_gb: float
    addresses: tuple[addresses.Address, ...]
    login: str
    network: str = ""
    notes: list[str] = field(default_factory=list)


def load(
    table: Table,
    path: str = "",
    hosts: str = "",
    hostfile: str = "",
    ssh_config: str = "",
    only: str = "",
    backend: str = "auto",
) -> Inventory | None:
    """Return the inventory of a cluster.yaml, of `a,b` or of a hostfile; by default of `cluster.yaml` in this folder.

    None means this machine: no option names an inventory and the file does not exist, or `backend` is a local one.
    This reads only files; see `complete`. Raises UsageError for missing or invalid files and conflicting options.
    """
    given = {"--inventory": path, "--hosts": hosts, "--hostfile": hostfile}
    named = [option for option, value in given.items() if value]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} cannot be used together", "use one of them")
    if on_this_machine(backend, table):
        for option, value in {**given, "--ssh-config": ssh_config, "--only": only}.items():
            if value:
                hint = "omit one of them"
                raise UsageError(f"--backend {backend} runs on this machine, so {option} has no effect", hint)
        return None
    if not named and not Path(DEFAULT_FILE).exists():
        if only or ssh_config:
            option = "--only" if only else "--ssh-config"
            raise UsageError(f"{option}: no {DEFAULT_FILE} in this folder", "name one with --inventory FILE")
        return None
    if hosts:
        loaded = inventory.from_hosts(hosts)
    elif hostfile:
        loaded = inventory.from_hostfile(_text(hostfile, "--hostfile"), hostfile)
    else:
        from cluster.spec import schema  # imports pydantic and yaml, which only cluster.yaml needs

        inventory_file = path or DEFAULT_FILE
        text = _text(inventory_file, "--inventory")
        loaded = schema.read(text, inventory_file, table, str(Path.cwd()))
    if ssh_config:
        absolute = str(Path.cwd() / Path(ssh_config).expanduser())
        machines = tuple(replace(node, ssh_config=absolute) for node in loaded.machines)
        loaded = replace(loaded, machines=machines)
    for file in {node.ssh_config for node in loaded.machines if node.ssh_config}:
        _text(file, "--ssh-config" if ssh_config else f"{loaded.path}: ssh_config")
    return inventory.select(loaded, only) if only else loaded


def complete(given: Inventory) -> Inventory:
    """Return the inventory with missing values from the machines, in parallel. Raises the errors of `inspect`."""
    if inventory.is_complete(given):
        return given
    wanted = replace(given, device="any") if given.is_assigned else given  # a login node needs no GPU
    return replace(given, machines=tuple(host.machine for host in inspect(wanted).values()))


def inspect(given: Inventory) -> dict[str, InspectedMachine]:
    """Return the facts of every machine by node name; given values stay. Raises one ClusterError for all that fail."""
    facts = parallel.all_of(given.machines, lambda node: _inspect(node, needs_gpus=given.device == "cuda"))
    without = [name for name, host in facts.items() if not host.machine.in_container]
    if without and len(without) < len(facts):
        engine = next(host.machine.runtime for host in facts.values() if host.machine.in_container)
        why = "\n       ".join(f"{name}: {facts[name].engine}" for name in without)
        hint = f"the other nodes have {engine}: start it there, omit the machine, or use --runtime {BARE.name} for all"
        raise LaunchError(why, hint)
    if all(node.address for node in given.machines):
        return facts
    for name, address in _addresses(facts).items():
        host = facts[name]
        if not host.machine.address:
            host.machine = replace(host.machine, address=address.number)
            host.network = address.device
            host.notes += addresses.warnings(address)
    return facts


def _inspect(node: Machine, *, needs_gpus: bool) -> InspectedMachine:
    folders = {"run_dir": node.run_dir or inventory.RUN_DIR, "data_dir": node.data_dir or inventory.DATA_DIR}
    engines = (word for name, runtime in ENGINES.items() for word in (name, runtime.info))
    done = reach(node).run(scripts.bash(_SCRIPT, "machine", *engines, **folders), timeout_s=_TIMEOUT_S)
    if done.code:
        why = f"{node.name}: cannot be inspected: {done.last_line}"
        raise LaunchError(why, "it needs bash and coreutils")
    words = done.out.split("\0")
    fields = dict(zip(words[0::2], words[1::2], strict=False))
    speeds = {}
    for name, value in fields.items():
        if name.startswith("speed ") and value.isdigit():
            speeds[name.removeprefix("speed ")] = int(value)
    if not node.address and "inet" not in fields["addresses"]:
        hint = "apt-get install iproute2"
        raise LaunchError(f"{node.name}: `ip addr` fails: {fields['addresses'].strip() or 'none'}", hint)
    gpus, notes = _gpus(node, fields, needed=needs_gpus)
    runtime, engine = _runtime(node, fields)
    if runtime == BARE.name and not node.runtime:
        notes.append(f"{engine}: jobs run without a container, with the python3 of the machine")
    if reached := reach(node).note:
        notes.append(reached)
    node = replace(node, gpus=node.gpus or tuple(gpus), runtime=node.runtime or runtime)
    # $SSH_CONNECTION: the client's address and port, then the server's.
    connection = fields["ssh"].split()
    return InspectedMachine(
        machine=replace(node, run_dir=fields["run_dir"], data_dir=fields["data_dir"]),
        hostname=fields["hostname"],
        gpus=gpus,
        engine=engine,
        free_gb=int(fields["free"] or 0) / 1e9,
        addresses=addresses.addresses(fields["addresses"], speeds),
        login=connection[2] if len(connection) > 2 else "",
        notes=notes,
    )


def _gpus(node: Machine, fields: Mapping[str, str], *, needed: bool) -> tuple[dict[Gpu, str], list[str]]:
    """Return the machine's GPUs by id, and notes."""
    if fields.get("gpus_code", "0") != "0":
        lines = fields["gpus"].strip().splitlines()
        why = f"nvidia-smi fails: {lines[-1] if lines else 'no answer in 10 s'}"
        if needed:
            hint = "repair its driver, or use --device cpu (in cluster.yaml: device: cpu)"
            raise LaunchError(f"{node.name}: {why}", hint)
        return {}, [why]
    listed = nvidia_smi.listed_gpus(fields.get("gpus", ""))
    return {gpu: facts.model for gpu, facts in listed.items()}, []


def _runtime(node: Machine, fields: Mapping[str, str]) -> tuple[str, str]:
    """Return the first engine that answers, or no engine, and a description."""
    installed = [name for name in ENGINES if name in fields]
    for name in installed:
        if match := re.search(r"(?m)^engine_version=(\d\S*)\nengine_security=(.*)", fields[name]):
            rootless = " rootless" if "rootless" in match[2] else ""
            return name, f"{name} {match[1]}{rootless}"
    is_denied = re.search(r"(?i)permission denied.* (socket|daemon)", fields.get(DOCKER.name, ""))
    if is_denied and not node.runtime:
        user = fields["user"]
        hint = f"there: sudo usermod -aG docker {user} (then log in again), or --runtime {BARE.name}"
        raise LaunchError(f"{node.name}: {user} has no permission to use Docker", hint)
    if not installed:
        return BARE.name, f"neither {' nor '.join(ENGINES)} is installed"
    first = installed[0]
    lines = [line.strip() for line in fields[first].splitlines() if not line.startswith("engine_")]
    said = [line for line in lines if line]
    return BARE.name, f"{first} does not answer ({said[-1] if said else 'silent for 10 s'})"


def _addresses(hosts: Mapping[str, InspectedMachine]) -> dict[str, addresses.Address]:
    """Choose the addresses from every machine's routes to the addresses of the others."""
    numbers = {}
    for name, host in hosts.items():
        numbers[name] = [address.number for address in addresses.candidates(host.addresses)]

    def routes(node: Machine) -> dict[str, addresses.Route]:
        wanted = []
        for name, theirs in numbers.items():
            if name != node.name:
                wanted += theirs
        done = reach(node).run(scripts.bash(_SCRIPT, "routes", *wanted), timeout_s=_TIMEOUT_S)
        words = done.out.split("\0")
        return {number: addresses.route(text) for number, text in zip(words[0::2], words[1::2], strict=False)}

    known = parallel.all_of([host.machine for host in hosts.values()], routes)
    available = {name: host.addresses for name, host in hosts.items()}
    logins = {name: host.login for name, host in hosts.items()}
    return addresses.choose(available, known, logins)


def device(hosts: Mapping[str, InspectedMachine], given: str) -> str:
    """Return `cuda` if every node has GPUs, `cpu` if none has. Raise ClusterError if only some have."""
    without = [name for name, host in hosts.items() if not host.gpus]
    if given == "cuda" and without:
        hint = "check their drivers with nvidia-smi, or use --device cpu"
        raise ClusterError(f"no GPU on {', '.join(without)}", hint)
    if given != "auto":
        return given
    if without and len(without) < len(hosts):
        others = [name for name in hosts if name not in without]
        hint = f"omit them: clusterctl init {' '.join(others)}; or use --device cpu for all"
        raise ClusterError(f"nodes without a GPU: {', '.join(without)}; with GPUs: {', '.join(others)}", hint)
    return "cpu" if without else "cuda"


def _text(path: str, option: str) -> str:
    if Path(path).expanduser().is_dir():
        if option == "--inventory" and path == DEFAULT_FILE:  # it was found, not typed
            raise UsageError(f"{DEFAULT_FILE} is a folder, not an inventory", "name the inventory: -i FILE")
        inside = Path(path, DEFAULT_FILE)
        hint = f"use -i {inside}" if inside.is_file() else "give the path of a file in it, or another one"
        raise UsageError(f"{option} {path}: expected a file, but this is a folder", hint)
    try:
        return Path(path).expanduser().read_text()
    except UnicodeDecodeError:
        raise UsageError(f"{option} {path}: not a text file") from None
    except OSError as error:
        hint = "check the path"
        if option == "--inventory":
            hint = f"to write one: clusterctl init gpu-a gpu-b -o {path}"
        raise UsageError(f"{option} {path}: {error.strerror}", hint) from None
