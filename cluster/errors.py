"""The errors a user can cause or meet: each says what, where and why, and what to type next."""


class ClusterError(Exception):
    """Something the user can mend: a message, a hint with the next step, and the exit code it ends with."""

    exit_code = 3

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(ClusterError):
    """The request itself is wrong; nothing was started or written."""

    exit_code = 2


class PortTakenError(UsageError):
    """Another program holds the master port."""


class NameTakenError(UsageError):
    """There is a job of this name already."""


class GpusHeldError(UsageError):
    """Another job has the GPUs."""


class LaunchError(ClusterError):
    """A place could not be started; those that had been are stopped again."""

    exit_code = 3


class UnreachableError(ClusterError):
    """A machine or an engine does not answer."""

    exit_code = 5


def with_hint(why: str, hint: str) -> str:
    """Both in one line, for where more is said after them."""
    return f"{why} ({hint})" if hint else why
