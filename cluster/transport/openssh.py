"""Arguments of the `ssh` program for a node, which rsync starts. Pure."""

from __future__ import annotations

import shlex
from pathlib import Path

from cluster.spec.model import Node

#: Every remote command prints this line first. Any output before it comes from the login shell.
BEGIN = "clusterctl begins"


def destination(login: str) -> str:
    """Return `user@host` of a login for ssh."""
    user, mark, rest = login.rpartition("@")
    return f"{user}{mark}{_split(rest)[0]}"


def port_of(login: str) -> str:
    """Return the port of a login, or ""."""
    return _split(login.rpartition("@")[2])[1]


def remote_shell(node: Node) -> str:
    """Return the value of rsync's `-e`: ssh without prompts, with known host keys only, with the node's ssh_config.

    A filter drops the login shell's output up to the line BEGIN.
    """
    words = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
    words += ["-o", "ConnectTimeout=8", "-o", "ServerAliveInterval=5"]
    if node.ssh_config:
        words += ["-F", str(Path(node.ssh_config).expanduser())]
    if port := port_of(node.login):
        words += ["-p", port]
    # The login shell's last line may lack its newline, so BEGIN may follow other text.
    filter_ = (
        f'set -o pipefail; "$@" | {{ while read -r line && [ "${{line%{BEGIN}}}" = "$line" ]; do :; done; exec cat; }}'
    )
    return shlex.join(["bash", "-c", filter_, "rsh", *words])


def _split(host: str) -> tuple[str, str]:
    # As in fabric: more than one colon is an IPv6 address, without a port.
    name, _, port = host.partition(":")
    return (name, port) if host.count(":") == 1 else (host.strip("[]"), "")
