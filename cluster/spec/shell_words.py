"""Words of a command, as a shell splits them. Pure."""

import shlex

from cluster.errors import UsageError


def split(text: str, where: str, *, comments: bool = False) -> list[str]:
    """Split a text into words as a shell does. Raise UsageError if it is malformed."""
    try:
        return shlex.split(text, comments=comments)
    except ValueError as error:
        raise UsageError(f"{where}: {error}", "quote it as for a shell") from error
