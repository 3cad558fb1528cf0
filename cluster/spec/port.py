"""The port of rank 0. Pure."""

import hashlib

from cluster.errors import UsageError

#: Ports for `auto`: below the ephemeral range of Linux, so that no outgoing connection occupies one.
_AUTO_PORTS = range(20000, 30000)


def parse(text: str) -> int:
    """Return the port of `--master-port`, 0 for `auto`. Raise UsageError for anything else."""
    if text == "auto":
        return 0
    if not text.isdecimal() or not 1024 <= int(text) <= 65535:
        raise UsageError(f"--master-port {text!r}: expected auto, or a number from 1024 to 65535")
    return int(text)


def auto_port(name: str, nth: int = 0) -> int:
    """Return the nth port to try for a job; it depends only on the job's name."""
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return _AUTO_PORTS[(first + nth) % len(_AUTO_PORTS)]
