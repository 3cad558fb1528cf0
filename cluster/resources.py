"""The shell scripts and programs of this package, as text: they run on machines that have nothing of this project."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_FOLDER = Path(__file__).parent


@functools.cache
def text(*names: str) -> str:
    """The files `names`, relative to this package, one after the other."""
    return "".join((_FOLDER / name).read_text(encoding="utf-8") for name in names)


def digest(name: str) -> str:
    """The first 12 hex digits of the SHA-256 of a file of this package."""
    return hashlib.sha256(text(name).encode()).hexdigest()[:12]
