"""Words into bash text, and fields into the CSV of --mount, as plans hold them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

#: The place in a runtime's command of the options that are found on the node.
OPTIONS = "@options@"


def exports(values: Mapping[str, str]) -> str:
    """One `export NAME=value` line each, in the given order, quoted for any POSIX shell."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())


def line(words: Sequence[str]) -> str:
    """The words as one command."""
    return shlex.join(words)


def csv(fields: Sequence[str]) -> str:
    """One line of CSV, which is what `--mount` takes: a path may hold ':', ',' and quotes."""
    return ",".join('"' + field.replace('"', '""') + '"' if set(field) & set(',"\n') else field for field in fields)
