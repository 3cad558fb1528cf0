"""Cache folders: in a job the node's, which outlives the container and serves later jobs; otherwise the user's."""

import os
from collections.abc import Mapping
from pathlib import Path

from trainer import contract


def of_user(environment: Mapping[str, str] = os.environ) -> Path:
    """Return `$XDG_CACHE_HOME`, by default ~/.cache."""
    home = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (Path.home can raise)
    return Path(home)


def of_node(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the node's cache folder, if this process is part of a job and may write there."""
    folder = Path(environment.get(contract.CACHE_DIR, ""))
    return folder if can_be_made(folder) else None


def can_be_made(folder: Path) -> bool:
    """Whether an absolute path, or the nearest folder above it that exists, can be written."""
    existing = next((part for part in (folder, *folder.parents) if part.exists()), folder)
    return folder.is_absolute() and existing.is_dir() and os.access(existing, os.W_OK)
