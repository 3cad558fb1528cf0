"""What the two kinds of connections to a machine have in common: fabric's, and those of the ssh program."""

from typing import Protocol


class NotStartedError(Exception):
    """The connection was no longer usable, so the command has not started; it may run over a new one."""


class BrokenError(Exception):
    """The connection broke while the command was running."""


class Link(Protocol):
    """An open connection, on which several threads run commands."""

    @property
    def is_open(self) -> bool:
        """Whether the connection is usable, as far as this machine knows."""
        ...

    @property
    def socket(self) -> str:
        """The socket of a master connection that other ssh programs can use, "" if there is none."""
        ...

    def execute(self, line: str, data: bytes, until: float) -> tuple[int, bytes, bytes]:
        """Run a command line with `data` as its stdin; return its exit code, stdout and stderr.

        Raises TimeoutError if it does not end before the monotonic time `until`, NotStartedError, BrokenError.
        """
        ...

    def ping(self) -> bool:
        """Return whether the machine responds. This waits until the connection breaks."""
        ...

    def close(self) -> None:
        """Close the connection. Its commands end."""
        ...
