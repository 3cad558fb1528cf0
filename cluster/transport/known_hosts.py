"""The host keys that ssh knows for a host, looked up by `ssh-keygen -F`: hashed names, wildcards, markers."""

import base64
import binascii
import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.transport.settings import Settings

_FOUND = re.compile(r"# Host .* found: line (\d+)")
_TIMEOUT_S = 8.0


@dataclass(frozen=True)
class KnownKey:
    """A line of a known_hosts file that matches a host. `marker` is "", `@cert-authority` or `@revoked`."""

    file: str
    line: int
    marker: str
    names: str
    kind: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """The fingerprint, as ssh prints it."""
        return fingerprint(self.blob)

    def __str__(self) -> str:
        """`FILE:LINE`."""
        return f"{self.file}:{self.line}"


def fingerprint(blob: bytes) -> str:
    """Return the SHA256 fingerprint of a public key."""
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


def name_of(settings: Settings) -> str:
    """Return the name under which ssh stores the host's key: `host`, `[host]:port`, or the HostKeyAlias."""
    host = settings.text("hostname").lower()
    port = settings.text("port")
    return settings.text("hostkeyalias").lower() or (host if port in ("22", "") else f"[{host}]:{port}")


def files(settings: Settings) -> list[Path]:
    """Return the files that ssh reads, of the user first. Raises no error for missing ones."""
    # `ssh -G` separates names by blanks and quotes none. A part that is no absolute path belongs to the name before.
    listed = [re.split(r" (?=[/~])", settings.text(f"{whose}knownhostsfile")) for whose in ("user", "global")]
    return [Path(name).expanduser() for names in listed for name in names if name not in ("", "none")]


def lookup(settings: Settings) -> tuple[KnownKey, ...]:
    """Return the lines that match the host. Unreadable files have none, as for ssh. Raises OSError, TimeoutExpired."""
    matches = _matches(settings, name_of(settings))
    if not matches and not settings.text("hostkeyalias"):
        # ssh accepts a key of the host's port 22 on another port, but not if that has one.
        matches = _matches(settings, settings.text("hostname").lower())
    return matches


def unreadable(settings: Settings) -> list[str]:
    """Return the files that exist and cannot be read."""
    return [_shown(file) for file in files(settings) if file.is_file() and not os.access(file, os.R_OK)]


def line_of(file: str, wanted: str) -> int:
    """Return the number of the line with this fingerprint in a file of public keys, 0 if there is none."""
    try:
        lines = Path(file).read_bytes().decode(errors="replace").splitlines()
    except OSError:
        return 0
    for number, line in enumerate(lines, 1):
        if any(fingerprint(blob) == wanted for blob in map(_decoded, line.split())):
            return number
    return 0


def _matches(settings: Settings, name: str) -> tuple[KnownKey, ...]:
    return tuple(key for file in files(settings) if file.is_file() for key in _in_file(file, name))


def _in_file(file: Path, name: str) -> Iterator[KnownKey]:
    argv = ["ssh-keygen", "-F", name, "-f", str(file)]
    done = subprocess.run(argv, capture_output=True, check=False, timeout=_TIMEOUT_S)
    number = 0
    for line in done.stdout.decode(errors="replace").splitlines():
        if match := _FOUND.match(line):
            number = int(match[1])
            continue
        fields = line.split()
        marker = fields.pop(0) if line.startswith("@") else ""
        # Other lines are keys of protocol 1, or damaged; ssh ignores them, too.
        if len(fields) > 2 and (blob := _decoded(fields[2])):
            yield KnownKey(_shown(file), number, marker, fields[0], fields[1], blob)


def _shown(file: Path) -> str:
    # A terminal cannot print a name that is not UTF-8.
    return os.fsencode(file).decode(errors="replace")


def _decoded(word: str) -> bytes:
    try:
        return base64.b64decode(word, validate=True)
    except (binascii.Error, ValueError):
        return b""
