"""Values that stand on no command line, in no plan, record or log: read here, sent to the nodes, forgotten."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.errors import UsageError

_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def read(path: str) -> dict[str, str]:
    """The NAME=VALUE lines of a file; "" is no file. Values are taken as they are, but for quotes around a whole one.

    Raises UsageError with the line's number, and never with its text.
    """
    if not path:
        return {}
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(f"--env-file {path}: {why}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise UsageError(f"--env-file {path}, line {number}: not NAME=VALUE")
        value = match[2]
        found[match[1]] = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    return found


def values(names: Sequence[str], file: Mapping[str, str]) -> dict[str, str]:
    """The value of each name, from the file or else from this process's environment; raises UsageError for others."""
    missing = [name for name in names if name not in file and name not in os.environ]
    if missing:
        raise UsageError(
            f"--env {missing[0]}: it is not set in your environment", f"export {missing[0]}=..., or use --env-file FILE"
        )
    return {name: file[name] if name in file else os.environ[name] for name in names}
