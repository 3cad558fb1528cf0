"""Finds the machines: the inventory that options or the current folder name, and what the machines themselves have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cluster import inventory
from cluster.errors import UsageError
from cluster.model import Inventory

DEFAULT_FILE = "cluster.yaml"


def load(
    path: str = "", hosts: str = "", hostfile: str = "", ssh_config: str = "", only: str = "", cwd: str = ""
) -> Inventory | None:
    """The inventory of a cluster.yaml, of `a,b` or of a hostfile; by default of `cluster.yaml` in `cwd`.

    None where nothing is named and there is no such file: this machine is meant. Only files are read; see `complete`.
    Raises UsageError for what is not there, says nothing, or excludes each other.
    """
    given = {"--inventory": path, "--hosts": hosts, "--hostfile": hostfile}
    named = [option for option, value in given.items() if value]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} exclude each other", "they are three ways to name the machines")
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
    """The inventory with what its text leaves open looked for on the machines."""
    return found


def _text(here: Path, path: str, option: str) -> str:
    try:
        return (here / Path(path).expanduser()).read_text()
    except UnicodeDecodeError:
        raise UsageError(f"{option} {path}: not a text file") from None
    except OSError as error:
        hint = "clusterctl init gpu-a gpu-b writes one" if option == "--inventory" else ""
        raise UsageError(f"{option} {path}: {error.strerror}", hint) from None
