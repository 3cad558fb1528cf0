"""Inventories from a hostfile or a list of hosts; `discovery.complete` finds what they do not specify. Pure."""

import re
from collections.abc import Sequence
from dataclasses import replace

from cluster.errors import UsageError
from cluster.spec.model import Inventory, Machine

RUN_DIR = "~/clusterctl/runs"
DATA_DIR = "~/clusterctl/data"

#: The pattern of a node's name, which container and file names contain.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
_IPV6 = r"[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f.]*(?:%[A-Za-z0-9_.-]+)?"  # after %: the network device
_HOST = rf"[A-Za-z0-9_][A-Za-z0-9._-]*|{_IPV6}|\[{_IPV6}\]"
_LOGIN = re.compile(rf"(?:(?P<user>[^\s@:/-][^\s@:/]*)@)?(?P<host>{_HOST})(?::(?P<port>[0-9]{{1,5}}))?")
#: `host`, `host:4` or `host slots=4 max_slots=8`. An IPv6 address has more than one colon.
_HOSTFILE_LINE = re.compile(
    r"(?P<login>[^\s:\[]*\[[^\s\]]+\]|[^\s:]+|[^\s:]*(:[^\s:]*){2,})(:(?P<count>[1-9]\d{0,3}))?"
    r"(\s+slots=(?P<slots>[1-9]\d{0,3}))?(\s+max[_-]slots=\d+)?"
)
_LOGIN_FORM = "[USER@]HOST[:PORT], an IPv6 address with a port as [fd00::1]:22, or a name from ~/.ssh/config"


def from_hosts(text: str) -> Inventory:
    """Return the inventory of `a,b`, each a `[user@]host[:port]` or a name from an ssh_config."""
    return _of_logins([(f"--hosts {text!r}", host.strip(), 0) for host in text.split(",")])


def from_hostfile(text: str, path: str) -> Inventory:
    """Return the inventory of a hostfile of Open MPI, MPICH, DeepSpeed or Horovod, one machine per line.

    A line is `host`, `host slots=4` (also with `max_slots=8`) or `host:4`; a slot is a GPU. `#` starts a comment.
    """
    hosts: list[tuple[str, str, int]] = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        entry = line.partition("#")[0].strip()
        match = _HOSTFILE_LINE.fullmatch(entry)
        if match:
            hosts.append((f"{path}:{number}", match["login"], int(match["count"] or match["slots"] or 0)))
        elif entry:
            raise UsageError(f"{path}:{number}: {entry!r}: not HOST slots=N", "for example: worker-1 slots=4")
    if not hosts:
        raise UsageError(f"{path}: no machine", "name one per line, for example: worker-1 slots=4")
    return replace(_of_logins(hosts), path=path)


def select(inventory: Inventory, names: str) -> Inventory:
    """Return the inventory with only the nodes `a,b`, names or labels, in its order. Raise UsageError for others."""
    wanted = [name.strip() for name in names.split(",")]
    known = [machine.name for machine in inventory.machines]
    known += dict.fromkeys(label for machine in inventory.machines for label in machine.labels)
    for name in wanted:
        if name not in known:
            raise UsageError(f"--only {names!r}: no node {name!r}", f"names and labels: {', '.join(known)}")
    chosen = (machine for machine in inventory.machines if {machine.name, *machine.labels} & {*wanted})
    return replace(inventory, machines=tuple(chosen))


def is_complete(inventory: Inventory) -> bool:
    """Whether every value is specified, so that discovery is not needed."""
    return all(
        node.runtime
        and node.run_dir.startswith("/")
        and node.data_dir.startswith("/")
        and (inventory.is_assigned or (node.address and (node.gpus or inventory.device != "cuda")))
        for node in inventory.machines
    )


def valid_login(text: str) -> str:
    """Return a valid login unchanged ("": this machine). Raise UsageError for an invalid one."""
    if text and not _LOGIN.fullmatch(text):
        raise UsageError(f"{text!r}: not a login", _LOGIN_FORM)
    return text


def _of_logins(logins: Sequence[tuple[str, str, int]]) -> Inventory:
    """Return the inventory of (origin, login, number of GPUs) entries; a node's name is the host of its login."""
    nodes: dict[str, Machine] = {}
    for origin, login, gpus in logins:
        match = _LOGIN.fullmatch(login)
        if not match:
            raise UsageError(f"{origin}: {login!r} is not a login", _LOGIN_FORM)
        name = re.sub(r"[:%]", "-", match["host"].strip("[]")).strip("-")
        if not re.fullmatch(NAME, name):
            raise UsageError(
                f"{origin}: {name!r} is not a valid node name", "give the host an alias in ~/.ssh/config"
            )
        if name in nodes:
            raise UsageError(f"{origin}: {name} occurs twice", "name each machine once; its GPUs are slots")
        nodes[name] = Machine(name, "", tuple(range(gpus)), login=login, runtime="")
    return Inventory(tuple(nodes.values()))
