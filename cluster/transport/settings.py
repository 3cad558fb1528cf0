"""The settings of a host, as `ssh -G` evaluates them: Host, Match, Include, canonical names and OpenSSH's defaults."""

import functools
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.errors import UnreachableError
from cluster.spec.model import Machine

INSTALL = "sudo apt-get install openssh-client"
#: Limit of `ssh -G`, which may run the commands of `Match exec`.
_TIMEOUT_S = 8.0


@dataclass(frozen=True)
class Settings:
    """The lines of `ssh -G`: the values of each keyword, which is in lower case."""

    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def every(self, keyword: str) -> tuple[str, ...]:
        """Return the values of all lines with this keyword."""
        return self.values.get(keyword, ())

    def text(self, keyword: str) -> str:
        """Return the value of the first line with this keyword, or ""."""
        return self.values.get(keyword, ("",))[0]

    @property
    def is_strict(self) -> bool:
        """Whether the user's own `ssh` refuses a changed host key, so that its open ControlMaster can be trusted."""
        checks = self.text("stricthostkeychecking") not in ("false", "no", "off")
        return checks and self.text("nohostauthenticationforlocalhost") != "yes"


def destination(login: str) -> str:
    """Return `user@host` of a login for ssh."""
    user, mark, rest = login.rpartition("@")
    return f"{user}{mark}{_split(rest)[0]}"


def options(login: str, config_file: str) -> list[str]:
    """Return ssh's options for the configuration and the port of a login."""
    _, port = _split(login.rpartition("@")[2])
    file = ["-F", str(Path(config_file).expanduser())] if config_file else []
    return [*file, *(["-p", port] if port else [])]


def by_hand(node: Machine, *more: str) -> str:
    """Return the command that the user can type to log in."""
    return shlex.join(["ssh", *more, *options(node.login, node.ssh_config), destination(node.login)])


def read(node: Machine) -> Settings:
    """Return the settings of a node's login. Raises UnreachableError."""
    try:
        return _evaluate([*options(node.login, node.ssh_config), "--", destination(node.login)])
    except FileNotFoundError:
        raise UnreachableError("this machine: ssh is not installed", INSTALL) from None
    except subprocess.TimeoutExpired:
        why = f"{node.name}: ssh configuration: `ssh -G` does not end within {_TIMEOUT_S:g} s"
        raise UnreachableError(why, f"check it: {by_hand(node, '-G')}") from None
    except (ValueError, OSError) as error:
        why = f"{node.name}: ssh configuration: {error}"
        raise UnreachableError(why, f"check it: {by_hand(node, '-G')}") from error


@functools.cache
def defaults() -> Settings:
    """Return the settings of a host without a configuration. Raises ValueError, OSError, TimeoutExpired."""
    return _evaluate(["-F", "/dev/null", "--", "localhost"])


def _evaluate(words: Sequence[str]) -> Settings:
    # A command: ssh refuses some settings without one, and RemoteCommand with one. -T: else it misses a terminal.
    argv = ["ssh", "-TG", "-o", "RemoteCommand=none", *words, "true"]
    done = subprocess.run(argv, capture_output=True, check=False, timeout=_TIMEOUT_S)
    if done.returncode:
        said = done.stderr.decode(errors="replace").partition("\n")[0].strip()
        raise ValueError(said or f"ssh -G: exit {done.returncode}")
    values: dict[str, tuple[str, ...]] = {}
    for line in done.stdout.decode(errors="surrogateescape").splitlines():
        keyword, _, value = line.partition(" ")
        values[keyword.lower()] = (*values.get(keyword.lower(), ()), value)
    return Settings(values)


def _split(host: str) -> tuple[str, str]:
    # More than one colon is an IPv6 address, which has a port only in the form [fd00::1]:22.
    if host.startswith("["):
        name, _, port = host.removeprefix("[").partition("]")
        return name, port.removeprefix(":")
    name, _, port = host.partition(":")
    return (name, port) if host.count(":") == 1 else (host, "")
