"""The dataset of `data=`: whether this node has it, and where its relative paths begin."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from trainer.data.formats.data_yaml import Content, load_data_yaml, source_candidates
from trainer.errors import TrainerError

_YAML = (".yaml", ".yml")


def check(data: str) -> None:
    """Raise TrainerError if `data` is a path, and this node lacks it or its images.

    Names of datasets that the package brings or downloads are not checked.
    """
    path = Path(data)
    if "://" in data:
        return
    if not path.exists():
        if "/" in data:
            raise TrainerError(f"data={data}: no such file or folder on this node", _HINT)
        return
    if path.suffix not in _YAML or not path.is_file():
        return
    content = load_data_yaml(path)
    if content.values.get("download"):  # the package fetches what is missing
        return
    for split in ("train", "val"):
        for entry in content.entries(split):
            candidates = source_candidates(content.root(), str(entry))
            if not any(source.exists() for source in candidates):
                raise TrainerError(
                    f"data={data}: the {split} images are not on this node: {candidates[0]}", _HINT
                )


_HINT = (
    "correct the path; the launcher sends or mounts the folders that exist on its machine, others: --mount"
)


@contextlib.contextmanager
def beside(data: str) -> Iterator[None]:
    """Let the package resolve the relative `path` of a data.yaml from the folder of that file, as this trainer does.

    It takes the current folder, so `path: .` would mean another dataset on each node. If the folder is not beside the
    data.yaml, it is one that the package downloads, and nothing changes.
    """
    path = Path(data)
    is_file = path.suffix in _YAML and path.is_file()
    content = load_data_yaml(path) if is_file else Content(path, {}, {})
    root = Path(str(content.values.get("path") or "/"))
    if root.is_absolute() or not (path.parent / root).is_dir():
        yield
        return
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        yield
    finally:
        os.chdir(before)
