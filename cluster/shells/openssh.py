"""How the `ssh` program reaches the machine that a shell reaches: for rsync, which starts it by itself. Pure."""

from __future__ import annotations

import shlex
from pathlib import Path

from cluster.model import Node
from cluster.shells.result import BEGIN


def destination(node: Node) -> str:
    """`user@host` of a node's login, without its port; an IPv6 address in brackets, as rsync needs it."""
    user, mark, host = destination_of(node.login).rpartition("@")
    return f"{user}{mark}{f'[{host}]' if ':' in host else host}"


def destination_of(login: str) -> str:
    """`user@host` of a login, as ssh needs it."""
    user, mark, rest = login.rpartition("@")
    return f"{user}{mark}{_split(rest)[0]}"


def port_of(login: str) -> str:
    """The port of a login, "" without one."""
    return _split(login.rpartition("@")[2])[1]


def remote_shell(node: Node) -> str:
    """The value of rsync's `-e`: never asks, trusts only known host keys, reads the node's ssh_config.

    The text that a login shell prints, up to the line BEGIN, does not reach rsync.
    """
    words = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
    words += ["-o", "ConnectTimeout=8", "-o", "ServerAliveInterval=5"]
    if node.ssh_config:
        words += ["-F", str(Path(node.ssh_config).expanduser())]
    if port := port_of(node.login):
        words += ["-p", port]
    # The greeting may lack its last newline, so that BEGIN is the end of a line.
    filter_ = (
        f'set -o pipefail; "$@" | {{ while read -r line && [ "${{line%{BEGIN}}}" = "$line" ]; do :; done; exec cat; }}'
    )
    return shlex.join(["bash", "-c", filter_, "rsh", *words])


def _split(host: str) -> tuple[str, str]:
    # As fabric reads it: more than one colon is an IPv6 address, which has no port here.
    name, _, port = host.partition(":")
    return (name, port) if host.count(":") == 1 else (host.strip("[]"), "")
