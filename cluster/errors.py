"""Exceptions with a message, a hint and an exit code, which `clusterctl` prints without a traceback."""

import re
from collections.abc import Sequence

#: Complete control sequences of a terminal: CSI (colours, cursor), and strings such as OSC (title, clipboard).
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
)
#: All other control characters except tab and newline, and those that change the direction of the text after them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return a text without what would control a terminal. It may come from a node, a job or another program.

    Escape sequences could set the clipboard or the title, and hide or forge lines.
    """
    return text if text.isprintable() else _CONTROLS.sub("", _SEQUENCES.sub("", text))


class ClusterError(Exception):
    """Base class: the message says what happened and where, the hint what to type next. Both are printable."""

    exit_code = 3

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = printable(message)
        self.hint = printable(hint)
        super().__init__(self.message)


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
    return meant(name, known) or f"use one of: {', '.join(known)}"


def meant(name: str, known: Sequence[str]) -> str:
    """Return a question with the names that are like an unknown one, or ""."""
    import difflib

    near = difflib.get_close_matches(name, known, 2)
    return f"did you mean {' or '.join(near)}?" if near else ""
