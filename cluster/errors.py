"""Exceptions with a message, a hint and an exit code, which `clusterctl` prints without a traceback."""

from collections.abc import Sequence


class ClusterError(Exception):
    """Base class: the message says what happened and where, the hint what to type next."""

    exit_code = 3

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(ClusterError, ValueError):
    """The request is wrong; nothing was started or written. A ValueError, so that pydantic validators can raise it."""

    exit_code = 2


class PortTakenError(UsageError):
    """Another program holds the master port."""


class NameTakenError(UsageError):
    """A job of this name exists."""


class GpusHeldError(UsageError):
    """Another job holds the GPUs."""


class LaunchError(ClusterError):
    """A node could not be started; all others were stopped."""


class UnreachableError(ClusterError):
    """A machine or its Docker Engine does not answer."""

    exit_code = 5


class SlowError(UnreachableError):
    """A command did not end in time. Its machine may still answer."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: it ends a command as Ctrl-C does, with everything that the command has started."""


def with_hint(why: str, hint: str) -> str:
    """Return message and hint in one line."""
    return f"{why} ({hint})" if hint else why


def near_or_all(name: str, known: Sequence[str]) -> str:
    """Return a hint with the names that are like an unknown one, or else with all."""
    import difflib

    near = difflib.get_close_matches(name, known, 2)
    return f"did you mean {' or '.join(near)}?" if near else f"use one of: {', '.join(known)}"
