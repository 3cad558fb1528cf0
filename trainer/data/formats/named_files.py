r"""Finds the file that a path in an export means: of Windows, of another folder, percent-encoded, of other Unicode.

CVAT writes `data/obj_train_data/1.jpg` for obj_train_data/1.jpg, COCO exports of Windows `train\1.jpg`, Label Studio
`/data/local-files/?d=set%2F1.jpg`, and macOS decomposes accented letters (NFD).
"""

import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

_SCHEME = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*://[^/]*|^[a-zA-Z]:")  # of a URL, or a drive


class NamedFiles:
    """The images below a folder, by their names."""

    def __init__(self, folder: str, files: Iterable[str]) -> None:
        """Index `files`, paths below `folder`."""
        self._by_name: dict[str, list[tuple[list[str], str]]] = defaultdict(list)
        for file in files:
            parts = list(Path(_composed(os.path.relpath(file, folder))).parts)
            self._by_name[parts[-1]].append((parts, file))

    def find(self, text: str) -> str | None:
        """Return the only file whose path ends as `text` does, or None. The longest common end counts."""
        parts = normal(text).split("/")
        found = self._by_name.get(parts[-1], [])
        most = max((_common_end(parts, own) for own, _ in found), default=0)
        nearest = [file for own, file in found if _common_end(parts, own) == most]
        return nearest[0] if len(nearest) == 1 else None


def normal(text: str) -> str:
    """Return a path with `/` between folders, decoded and in composed Unicode, without drive, host and query."""
    path = unquote(_SCHEME.sub("", text.replace("\\", "/")))
    _, found, query = path.partition("?d=")  # Label Studio's local files
    parts = [part for part in _composed(query if found else path).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _common_end(first: list[str], second: list[str]) -> int:
    """Return how many of the last folders and names are equal."""
    count = 0
    for own, other in zip(reversed(first), reversed(second), strict=False):
        if own != other:
            break
        count += 1
    return count
