"""What is known about a host before the login, and the decision between fabric and the ssh program."""

import subprocess
from dataclasses import dataclass

from cluster.errors import UnreachableError
from cluster.spec.model import Machine
from cluster.transport import keywords, known_hosts, settings
from cluster.transport.known_hosts import KnownKey
from cluster.transport.openssh import Ssh
from cluster.transport.settings import Settings, destination

_TIMEOUT_S = 8.0


@dataclass(frozen=True)
class Login:
    """A host's settings, and what else matters for a login.

    `changed` are the keywords whose values are not OpenSSH's defaults, `known` the host's keys in known_hosts files,
    and `has_master` says that the user has a ControlMaster open.
    """

    node: Machine
    settings: Settings
    changed: tuple[str, ...] = ()
    known: tuple[KnownKey, ...] = ()
    has_master: bool = False

    @property
    def where(self) -> str:
        """`NODE (USER@HOST:PORT)`, for errors."""
        user, host, port = (self.settings.text(keyword) for keyword in ("user", "hostname", "port"))
        return f"{self.node.name} ({user}@{host}:{port})"


def inspect(node: Machine) -> Login:
    """Return what this machine knows about a node; nothing is sent to it. Raises UnreachableError."""
    keywords = settings.read(node)
    try:
        usual = settings.defaults().values
        changed = tuple(
            keyword for keyword, values in keywords.values.items() if usual.get(keyword) != values
        )
        has_master = (
            bool(keywords.text("controlpath")) and keywords.is_strict and answers(Ssh(node, keywords))
        )
        return Login(node, keywords, changed, known_hosts.lookup(keywords), has_master)
    except FileNotFoundError as error:
        raise UnreachableError(f"this machine: {error.filename} is not installed", settings.INSTALL) from None
    except (ValueError, OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        raise UnreachableError(
            f"{node.name}: {error}", f"check it: {settings.by_hand(node, '-G')}"
        ) from error


def why_ssh(login: Login, failure: Exception | None = None) -> str:
    """Return why the ssh program has to log in, or "" if fabric can. Nothing else decides this.

    `failure` is the exception of fabric, if it has tried. paramiko knows a part of ssh_config and of known_hosts. So
    fabric is used if all that is configured is in that part, and the host has a key that paramiko can compare.
    """
    needed = [
        keyword for keyword in login.changed if keywords.needs_ssh(keyword, login.settings.every(keyword))
    ]
    reasons = [keywords.name(keyword) for keyword in needed]
    if login.has_master:
        reasons.append("an open ControlMaster")
    reasons += [f"{key.marker} in {key.file}" for key in login.known if key.marker]
    if not reasons and not any(not key.marker for key in login.known):
        reasons.append("no host key in known_hosts")
    if failure is not None:
        reasons.append(f"fabric: {str(failure).strip().rstrip('.') or type(failure).__name__}")
    return ", ".join(dict.fromkeys(reasons))


def answers(ssh: Ssh) -> bool:
    """Return whether a master connection is open, which commands of this ssh program would use. Raises OSError."""
    argv = [*ssh.words(), "-O", "check", "--", destination(ssh.node.login)]
    try:
        return not subprocess.run(argv, capture_output=True, check=False, timeout=_TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        return False
