"""The lines of an ssh_config with those of the files that it includes: paramiko passes over `Include`."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: As in OpenSSH: a file that includes itself is an error.
_DEPTH = 16


@dataclass
class Expanded:
    """All `lines`, and what they were read from: files, and the folders in which an Include looks for some."""

    lines: list[str] = field(default_factory=list)
    sources: list[Path] = field(default_factory=list)


def expand(file: Path, folder: Path) -> Expanded:
    """`folder` is where Include looks for relative names. Raises ValueError, or OSError for what cannot be read."""
    found = Expanded()
    _add(found, file, folder, (), 0)
    return found


def _add(found: Expanded, file: Path, folder: Path, around: Sequence[str], depth: int) -> None:
    # `around`: the conditions of the blocks that the file is included in, which hold for its own blocks as well.
    if depth > _DEPTH:
        raise ValueError(f"Include in {file}: more than {_DEPTH} files deep")
    found.sources.append(file)
    if not file.is_file():
        return
    conditions = list(around)
    for line in file.read_text().splitlines():
        setting = re.match(r"\s*(\w+)(?:\s*=\s*|\s+)(.+)", line)
        key, value = (setting[1].lower(), setting[2]) if setting else ("", "")
        if key == "include":
            for name in shlex.split(value, comments=True):
                path = folder / os.path.expanduser(name)  # noqa: PTH111 (a Path raises for a user that is not there)
                found.sources.append(path.parent)
                for each in sorted(glob.glob(str(path))):  # noqa: PTH207 (a Path globs below a folder only)
                    _add(found, Path(each), folder, conditions, depth + 1)
            # The file may have opened blocks of its own: what follows is in this one again.
            found.lines.append(_block(conditions))
        elif key in ("host", "match"):
            conditions = [*around, _condition(key, value)]
            found.lines.append(_block(conditions) if around or key == "match" else line)
        else:
            found.lines.append(line)


def _condition(key: str, value: str) -> str:
    """What a Host or Match line asks for, as Match spells it; "" where it is nothing."""
    words = shlex.split(value, comments=True)
    if key == "host":
        return f"originalhost {shlex.quote(','.join(words))}"
    if words in (["all"], ["canonical", "all"], ["final", "all"]):
        words.pop()  # paramiko refuses `final all`, which stands in what Red Hat's ssh_config includes
    return shlex.join(words)


def _block(conditions: Sequence[str]) -> str:
    """The line that opens a block in which all these hold."""
    asked = " ".join(filter(None, conditions))
    return f"Match {asked}" if asked else "Host *"
