"""From cluster.yaml, a hostfile or a list of hosts to an Inventory, and back: pure, and the only reader of the three.

What a text leaves open (an address, GPUs, a runtime, where `~` is) stays empty here; `discovery.complete` looks for it
on the machines.
"""

from __future__ import annotations

import ipaddress
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster import config, slurm
from cluster.errors import UsageError
from cluster.model import Inventory, Node

# pydantic and yaml take longer to import than everything else here, and only a cluster.yaml needs them.
if TYPE_CHECKING:
    from cluster.keys import Defaults, File, Machine
    from cluster.source import Source

RUN_DIR = "~/clusterctl/runs"
DATA_DIR = "~/clusterctl/data"

#: A node's name becomes part of container and file names, and is what people call the machine.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOST = r"[A-Za-z0-9_][A-Za-z0-9._-]*|[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f.]*"
_LOGIN = re.compile(rf"(?:(?P<user>[^\s@:/-][^\s@:/]*)@)?(?P<host>{_HOST})(?::(?P<port>[0-9]{{1,5}}))?")
_LOGIN_FORM = "[USER@]HOST[:PORT], or a name from ~/.ssh/config"


def from_yaml(text: str, path: str, cwd: str = "/") -> Inventory:
    """The inventory that a cluster.yaml means; relative paths in it are seen from its own folder.

    `path` is how errors call it, and relative to `cwd`.

    Raises UsageError that names the file, the line and the key.
    """
    from cluster.keys import Machine, validated
    from cluster.source import Source

    source = Source(path)
    read = validated(text, source)
    folder = posixpath.dirname(posixpath.join(cwd, path))
    for name, value in read.env.items():
        if not _ENV_NAME.fullmatch(name):
            raise source.error(("env", name), "not a variable's name")
        _refuse_nul(source, ("env", name), value)
    if isinstance(read.nodes, list):
        for index, name in enumerate(read.nodes):
            if name in read.nodes[:index]:
                raise source.error(("nodes", index), f"{name!r} stands there twice", "each machine once")
    machines = dict.fromkeys(read.nodes) if isinstance(read.nodes, list) else read.nodes
    if not machines:
        raise source.error(("nodes",), "no node", "for example: nodes: [gpu-a, gpu-b]")
    ssh_config = read.ssh_config if read.ssh_config[:1] in ("", "~") else posixpath.join(folder, read.ssh_config)
    mounts = []
    for index, mount in enumerate(read.mounts):
        _refuse_nul(source, ("mounts", index), mount)
        try:
            mounts.append(config.mount(mount, folder))
        except UsageError as error:
            what, hint = (text.replace("--mount ", "") for text in (error.message, error.hint))
            raise source.error(("mounts", index), what, hint) from None
    if read.slurm and read.backend != "slurm":
        raise source.error(
            ("slurm",), "only Slurm takes these options", "backend: slurm, with its login node as the node"
        )
    runtimes = {read.defaults.runtime, *(machine.runtime for machine in machines.values() if machine)}
    if read.backend == "ssh" and runtimes & {"apptainer", "pyxis"}:
        raise source.error(
            ("nodes",), "runtime apptainer and pyxis are for Slurm", "backend: slurm, or runtime: docker"
        )
    if read.backend == "slurm":
        if len(machines) > 1:
            raise source.error(
                ("nodes",), "a Slurm cluster has one node here, its login node", "Slurm knows the others"
            )
        try:
            slurm.checked(read.slurm)
        except UsageError as error:
            raise source.error(("slurm",), error.message.replace("--slurm ", ""), error.hint) from None
    made = Inventory(
        nodes=tuple(
            replace(_node(name, machine or Machine(), read, source), ssh_config=ssh_config)
            for name, machine in machines.items()
        ),
        backend=read.backend,
        options=dict(read.slurm),
        image=read.image,
        device=read.device,
        env=read.env,
        mounts=tuple(mounts),
        path=path,
    )
    _refuse_addresses(made.nodes, source)
    return made


def from_hosts(text: str) -> Inventory:
    """The inventory of `a,b` where each is `[user@]host[:port]` or a name from an ssh_config."""
    return _of_logins([(host.strip(), ()) for host in text.split(",")], [f"--hosts {text!r}"] * (text.count(",") + 1))


def from_hostfile(text: str, path: str) -> Inventory:
    """The inventory of a hostfile as Open MPI, MPICH, DeepSpeed and Horovod read it, one machine per line.

    `host`, `host slots=4` (also with `max_slots=8`), `host:4`; a slot is a GPU. `#` starts a comment.
    """
    found: list[tuple[str, tuple[int, ...]]] = []
    places: list[str] = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = f"{path}:{number}"
        host, mark, slots = words[0].rpartition(":") if words[0].count(":") == 1 else (words[0], "", "")
        options = {"slots": slots} if mark else {}
        for word in words[1:]:
            name, _, value = word.partition("=")
            name = name.replace("-", "_")
            if name not in ("slots", "max_slots") or name in options:
                raise UsageError(f"{place}: {word!r} is not understood", "for example: worker-1 slots=4")
            options[name] = value
        for name, value in options.items():
            if not re.fullmatch(r"[1-9][0-9]{0,3}", value):
                raise UsageError(f"{place}: {name} {value!r}: not a number of GPUs", "for example: worker-1 slots=4")
        found.append((host, tuple(range(int(options.get("slots", 0))))))
        places.append(place)
    if not found:
        raise UsageError(f"{path}: names no machine", "one per line, for example: worker-1 slots=4")
    return replace(_of_logins(found, places), path=path)


def only(inventory: Inventory, names: str) -> Inventory:
    """The inventory with just the nodes of `a,b`, names or labels, in its order; raises UsageError for others."""
    wanted = [name.strip() for name in names.split(",")]
    known = [node.name for node in inventory.nodes]
    known += dict.fromkeys(label for node in inventory.nodes for label in node.labels)
    for name in wanted:
        if name not in known:
            raise UsageError(f"--only {names!r}: no node {name!r}", f"there are: {', '.join(known)}")
    return replace(inventory, nodes=tuple(node for node in inventory.nodes if {node.name, *node.labels} & {*wanted}))


def is_complete(inventory: Inventory) -> bool:
    """Whether nothing is left to be looked for on the machines."""
    if inventory.backend == "slurm":  # who the nodes are is Slurm's to say
        return all(node.runtime and node.run_dir[:1] == "/" and node.data_dir[:1] == "/" for node in inventory.nodes)
    return all(
        node.address
        and node.runtime
        and node.run_dir.startswith("/")
        and node.data_dir.startswith("/")
        and (node.gpus or inventory.device != "cuda")
        for node in inventory.nodes
    )


def write(inventory: Inventory, notes: Mapping[str, Sequence[str]] | None = None, head: Sequence[str] = ()) -> str:
    """The cluster.yaml that `from_yaml` reads as this inventory; `notes` are comments above a node, by its name."""
    lines = [f"# {_one_line(line)}".rstrip() for line in head]
    lines += [f"backend: {inventory.backend}", f"device: {inventory.device}"]
    if inventory.options:
        lines += ["slurm:", *(f"  {_scalar(name)}: {_scalar(value)}" for name, value in inventory.options.items())]
    if inventory.image:
        lines.append(f"image: {_scalar(inventory.image)}")
    if inventory.nodes[0].ssh_config:
        lines.append(f"ssh_config: {_scalar(inventory.nodes[0].ssh_config)}")
    if inventory.env:
        lines += ["env:", *(f"  {_scalar(name)}: {_scalar(value)}" for name, value in inventory.env.items())]
    if inventory.mounts:
        lines.append("mounts:")
        for mount in inventory.mounts:
            lines.append(f"  - {_scalar(f'{mount.source}:{mount.target}' + ('' if mount.read_only else ':rw'))}")
    lines.append("nodes:")
    for node in inventory.nodes:
        lines += [f"  # {_one_line(note)}" for note in (notes or {}).get(node.name, ())]
        lines.append(f"  {_scalar(node.name)}:")
        if node.login != node.name:
            lines.append(f"    login: {_scalar(node.login)}")
        for key in ("address", "run_dir", "data_dir", "runtime"):
            if value := getattr(node, key):
                lines.append(f"    {key}: {_scalar(value)}")
        if node.gpus:
            first = node.gpus == tuple(range(len(node.gpus)))
            lines.append(f"    gpus: {len(node.gpus) if first else list(node.gpus)}")
        if node.labels:
            lines.append(f"    labels: [{', '.join(map(_scalar, node.labels))}]")
    return "\n".join(lines) + "\n"


def _node(name: str, machine: Machine, read: File, source: Source) -> Node:
    """A node with what it says itself, else with what `defaults` says, else with nothing."""
    key = ("nodes", name)
    _refuse_name(name, source.where(key))
    said = {
        **read.defaults.model_dump(exclude_none=True, exclude={"user", "port"}),
        **machine.model_dump(exclude_none=True),
    }

    def key_of(part: str) -> tuple[str, ...]:
        return (*key, part) if getattr(machine, part, None) is not None else ("defaults", part)

    gpus = said.get("gpus", ())
    ids = tuple(range(gpus)) if isinstance(gpus, int) else tuple(gpus)
    if (isinstance(gpus, int) and gpus < 0) or any(each < 0 for each in ids) or len(set(ids)) < len(ids):
        raise source.error(key_of("gpus"), f"{gpus} is no number or list of GPUs", "for example: gpus: 4, or [0, 2]")
    if "gpus" in said and not ids and read.device == "cuda":
        raise source.error(key_of("gpus"), "no GPU, and device is cuda", "device: cpu at the top, or leave it out")
    folders = {}
    for part in ("run_dir", "data_dir"):
        folder = said.get(part, "")
        _refuse_nul(source, key_of(part), folder)
        if folder and not folder.startswith(("/", "~/")):
            raise source.error(key_of(part), f"{folder!r} is relative", f"for example: {part}: /data/{part[:-4]}s")
        folders[part] = posixpath.normpath(folder) if folder else ""
    address = said.get("address", "")
    if address:
        _refuse_address(address, source.where((*key, "address")), name)
    return Node(
        name=name,
        address=address,
        gpus=ids,
        login=_login(said.get("login", name), read.defaults, source, key),
        runtime=said.get("runtime", "apptainer" if read.backend == "slurm" else ""),
        labels=tuple(said.get("labels", ())),
        **folders,
    )


def _login(text: str, defaults: Defaults, source: Source, key: tuple[str, ...]) -> str:
    if not text:
        return ""
    match = _LOGIN.fullmatch(text)
    if not match:
        raise source.error((*key, "login"), f"{text!r}: not a login", _LOGIN_FORM)
    if defaults.user and not match["user"]:
        text = f"{defaults.user}@{text}"
    if defaults.port and not match["port"]:
        if ":" in match["host"]:
            raise source.error((*key, "login"), f"{text!r}: no port here", "name it in ~/.ssh/config")
        text = f"{text}:{defaults.port}"
    return text


def _of_logins(logins: Sequence[tuple[str, tuple[int, ...]]], places: Sequence[str]) -> Inventory:
    """Nodes that are named after the host that one logs in to."""
    nodes: dict[str, Node] = {}
    for (login, gpus), place in zip(logins, places, strict=True):
        match = _LOGIN.fullmatch(login)
        if not match:
            raise UsageError(
                f"{place}: {login!r} is not a machine" if login else f"{place}: a name is empty", _LOGIN_FORM
            )
        name = match["host"].replace(":", "-").strip("-")
        _refuse_name(name, place)
        if name in nodes:
            raise UsageError(f"{place}: {name} stands there twice", "each machine once; GPUs are slots of it")
        nodes[name] = Node(name, "", gpus, login=login, runtime="")
    return Inventory(tuple(nodes.values()))


def _refuse_nul(source: Source, key: Sequence[str | int], value: str) -> None:
    """No system call takes a NUL character."""
    if "\0" in value:
        raise source.error(key, "there is a NUL character in it")


def _refuse_name(name: str, place: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{place}: a node's name {name!r}: letters, digits, '.', '_' and '-', 100 at most, a letter or digit first",
            "for example: gpu-a (what one logs in to is its login)",
        )


def _refuse_address(address: str, place: str, name: str) -> None:
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        raise UsageError(
            f"{place}: {name}: the address {address!r} is not a number; names mean other numbers on other machines",
            f"see it there with: ip address; or let it be found: clusterctl init {name}",
        ) from None
    if number.is_unspecified or number.is_multicast or (number.version == 6 and number.is_link_local):
        raise UsageError(
            f"{place}: {name}: nobody can dial {address}", "the machine's own address, for example 10.0.0.5"
        )


def _refuse_addresses(nodes: Sequence[Node], source: Source) -> None:
    """Two nodes at one address are one machine; a loopback address is another machine to everyone who dials it."""
    seen: dict[str, str] = {}
    loopback = [node for node in nodes if node.address and ipaddress.ip_address(node.address).is_loopback]
    for node in nodes:
        key = ("nodes", node.name, "address")
        if node.address and node.address in seen:
            raise source.error(key, f"{node.address} is {seen[node.address]}'s address, too", "each machine once")
        seen[node.address] = node.name
        if node in loopback and len(loopback) < len(nodes):
            raise source.error(
                key,
                f"{node.name}: {node.address} means a machine itself: no other node can reach it there",
                f"clusterctl init {' '.join(each.name for each in nodes)}",
            )


def _scalar(text: str) -> str:
    """One YAML scalar that reads back as this text, whatever is in it."""
    import yaml

    dumped: str = yaml.safe_dump(text, width=2**20, allow_unicode=True, default_style='"')
    plain = re.fullmatch(r"[A-Za-z/~][A-Za-z0-9/._@-]*", text) and isinstance(yaml.safe_load(text), str)
    return text if plain else dumped.rstrip("\n")


def _one_line(text: str) -> str:
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())
