"""Arguments of the `ssh` program for a node, for rsync and for sessions of the user. Pure."""

import base64
import shlex
from collections.abc import Sequence
from pathlib import Path

from cluster.spec.model import Node
from cluster.transport.local import MORE_PATH

WITHOUT_PROMPTS = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes")
#: The first line of every remote command. Output before it comes from `~/.bashrc`, which bash also reads under sshd.
BEGIN = "clusterctl begins"
MARK = f"{BEGIN}\n".encode()


def destination(login: str) -> str:
    """Return `user@host` of a login for ssh."""
    user, mark, rest = login.rpartition("@")
    return f"{user}{mark}{_split(rest)[0]}"


def remote_shell(node: Node) -> str:
    """Return the value of rsync's `-e`: ssh with the node's options, and a filter that drops output up to BEGIN."""
    # The login shell's last line may lack its newline, so BEGIN may follow other text.
    skip = f'while read -r line && [ "${{line%{BEGIN}}}" = "$line" ]; do :; done'
    return shlex.join(["bash", "-c", f'set -o pipefail; "$@" | {{ {skip}; exec cat; }}', "rsh", *_ssh(node)])


def command(node: Node, argv: Sequence[str], *, tty: bool = False, marked: bool = False) -> list[str]:
    """Return the command that runs `argv` on the node, on a terminal with `tty`; `argv` itself on this machine."""
    if not node.login:
        return list(argv)
    line = remote_line(argv, marked=marked)
    return [*_ssh(node), *(["-t", "-q"] if tty else ["-T"]), "--", destination(node.login), line]


def remote_line(argv: Sequence[str], *, marked: bool = False) -> str:
    """Return a command line for any login shell: it starts a bash that executes the command.

    With `marked` the line BEGIN precedes the command's output and its errors.
    """
    # csh keeps copies of its stdin and stdout open, so a daemon would delay the end of the output: close them.
    before = f"echo {BEGIN}; echo {BEGIN} >&2; exec 3>&- 4>&- 5>&- 6>&-; " if marked else ""
    # Base64 has no character that any shell expands. A word of csh has 1024 characters at most.
    coded = base64.b64encode(shlex.join(argv).encode()).decode()
    words = " ".join(coded[at : at + 1000] for at in range(0, len(coded), 1000))
    # A bash below sshd reads ~/.bashrc again unless SHLVL is above 1.
    begin = f"{before}PATH=$PATH:{MORE_PATH}"
    return f'exec env SHLVL=3 bash -c \'{begin}; line=$(printf %s "$@" | base64 -d) && eval "exec $line"\' bash {words}'


def after_mark(printed: bytes | bytearray) -> tuple[bool, str]:
    """Return whether the line BEGIN occurs, and the output after it; without it all output."""
    before, mark, after = printed.partition(MARK)
    return bool(mark), (after if mark else before).decode(errors="replace")


def options(login: str, config_file: str) -> list[str]:
    """Return ssh's options for the configuration and the port of a login."""
    _, port = _split(login.rpartition("@")[2])
    file = ["-F", str(Path(config_file).expanduser())] if config_file else []
    return [*file, *(["-p", port] if port else [])]


def _ssh(node: Node) -> list[str]:
    limits = ("-o", "ConnectTimeout=8", "-o", "ServerAliveInterval=5")
    return [*WITHOUT_PROMPTS, *limits, *options(node.login, node.ssh_config)]


def _split(host: str) -> tuple[str, str]:
    # As in fabric: more than one colon is an IPv6 address, without a port.
    name, _, port = host.partition(":")
    return (name, port) if host.count(":") == 1 else (host.strip("[]"), "")
