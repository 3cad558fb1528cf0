"""Command lines of the `ssh` program, for commands, rsync and sessions of the user. Pure."""

import base64
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.spec.model import Machine
from cluster.transport.local import MORE_PATH
from cluster.transport.settings import Settings, destination, options

#: Seconds to wait for a TCP connection with its key exchange.
CONNECT_TIMEOUT_S = 8
#: Every ssh: it asks nothing, changes no known_hosts file, checks each host key, starts no ControlMaster, and prints
#: no banner.
_QUIET = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "NoHostAuthenticationForLocalhost=no",
    "UpdateHostKeys=no",
    "ControlMaster=no",
    "LogLevel=ERROR",
    f"ConnectTimeout={CONNECT_TIMEOUT_S}",
)
#: Every command: what the configuration adds for a person at a terminal.
_PLAIN = (
    "RemoteCommand=none",
    "ClearAllForwardings=yes",
    "ForwardX11=no",
    "Tunnel=no",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
)
#: The same; an ssh that does not print such a keyword is too old to know it.
_PLAIN_IF_KNOWN = {"stdinnull": "StdinNull=no", "forkafterauthentication": "ForkAfterAuthentication=no"}
_PLAIN_IF_KNOWN |= {"sessiontype": "SessionType=default"}
#: The first line of every remote command. Output before it comes from `~/.bashrc`, which bash also reads under sshd.
BEGIN = "clusterctl begins"
MARK = f"{BEGIN}\n".encode()


@dataclass(frozen=True)
class Ssh:
    """The ssh program for a node; `socket` belongs to a connection that clusterctl has open, or ""."""

    node: Machine
    settings: Settings = field(default_factory=Settings)
    socket: str = ""

    def words(self, *first: str, tty: bool = False) -> list[str]:
        """Return ssh with all its options, before the destination; those in `first` win."""
        chosen = [*_QUIET, *_PLAIN, f"RequestTTY={'yes' if tty else 'no'}"]
        chosen += [text for keyword, text in _PLAIN_IF_KNOWN.items() if self.settings.every(keyword)]
        if jump := self.jump():
            chosen += ["ProxyUseFdpass=no", _proxy_command(jump)]
        if not self.socket and not self.settings.is_strict:
            chosen.append("ControlPath=none")  # its host key may be unchecked
        path = ["-S", self.socket.replace("%", "%%")] if self.socket else []
        return ["ssh", *first, *path, *_each(chosen), *options(self.node.login, self.node.ssh_config)]

    def command(self, argv: Sequence[str], *, tty: bool = False, marked: bool = False) -> list[str]:
        """Return the command that runs `argv` on the node, on a terminal with `tty`; `argv` itself on this machine."""
        if not self.node.login:
            return list(argv)
        line = remote_line(argv, marked=marked)
        return [*self.words(tty=tty), *(["-q"] if tty else []), "--", destination(self.node.login), line]

    def remote_shell(self) -> str:
        """Return the value of rsync's `-e`: ssh with its options, and a filter that drops output up to BEGIN."""
        # The login shell's last line may lack its newline, so BEGIN may follow other text.
        skip = f'while read -r line && [ "${{line%{BEGIN}}}" = "$line" ]; do :; done'
        filtered = f'set -o pipefail; "$@" | {{ {skip}; exec cat; }}'
        return shlex.join(["bash", "-c", filtered, "rsh", *self.words()])

    def jump(self) -> list[str]:
        """Return the command that connects through the ProxyJump, [] without one.

        The ssh that OpenSSH starts for a ProxyJump would ask for passwords, and follow StrictHostKeyChecking.
        """
        hops = self.settings.text("proxyjump")
        if not hops:
            return []
        target = f"[{self.settings.text('hostname')}]:{self.settings.text('port')}"
        return self._through(hops.split(","), target)

    def _through(self, hops: Sequence[str], target: str) -> list[str]:
        *before, last = hops
        chosen = [*_QUIET, "RemoteCommand=none", "RequestTTY=no"]
        if before:
            chosen.append(_proxy_command(self._through(before, "[%h]:%p")))
        config = options(last, self.node.ssh_config)
        return ["ssh", *_each(chosen), *config, "-W", target, "--", destination(last)]


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


def _proxy_command(words: Sequence[str]) -> str:
    """Return the option for this command, in which only the target of `-W` has tokens for ssh to expand."""
    target = words.index("-W") + 1
    quoted = [shlex.quote(word if at == target else word.replace("%", "%%")) for at, word in enumerate(words)]
    return f"ProxyCommand={' '.join(quoted)}"


def _each(texts: Sequence[str]) -> list[str]:
    return [word for text in texts for word in ("-o", text)]
