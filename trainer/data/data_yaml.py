"""The data.yaml of a YOLO-format data set: where the pictures are and what the classes are called."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.errors import TrainerError

# `download` is never followed: it would be someone else's code or address. `roboflow` is what that site's exports
# add about themselves.
_KEYS = ("path", "train", "val", "test", "nc", "names", "download", "roboflow")


@dataclass(frozen=True)
class DataYaml:
    """A checked data.yaml; `sources` are the folders and lists of pictures of one split."""

    path: Path
    names: list[str]
    sources: list[Path]
    where: str  # "data.yaml:3", the line that names the sources


def read_data_yaml(path: Path, split: str) -> DataYaml:
    """Read and check `path` for `split` (train or val); every error names the file, the line and the next step."""
    content, lines = _load(path)
    for key in content:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, 1)
            raise TrainerError(
                f"{path}:{lines[key]}: unknown key `{key}`",
                f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(_KEYS)}; delete the line",
            )
    names = _names(path, content, lines)
    if content.get(split) in (None, "", []):
        raise TrainerError(
            f"{path}:{lines.get(split, 1)}: no `{split}` pictures are named",
            f"add a line such as `{split}: images/{split}`",
        )
    where = f"{path}:{lines[split]}"
    entries = content[split] if isinstance(content[split], list) else [content[split]]
    if not all(isinstance(entry, str) for entry in entries):
        raise TrainerError(f"{where}: `{split}` must be a path or a list of paths", "see the line's indentation")
    root = _root(path, content, lines)
    sources = [_source(root, entry, where, split, content.get("download")) for entry in entries]
    return DataYaml(path, names, sources, where)


def _load(path: Path) -> tuple[dict[Any, Any], dict[Any, int]]:
    """The mapping in `path` and the line of each of its keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TrainerError(
            f"{path}: no such data set", "give the path of a data.yaml, or `digits` for the built-in data set"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TrainerError(f"{path}: cannot be read: {error}", "is it a data.yaml?") from None
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if not isinstance(node, yaml.MappingNode):
                raise TrainerError(f"{path}:1: not a mapping of keys to values", f"keys: {', '.join(_KEYS)}")
            lines: dict[Any, int] = {}
            for key_node, _ in node.value:
                key = loader.construct_object(key_node)
                line = key_node.start_mark.line + 1
                if key in lines:
                    raise TrainerError(f"{path}:{line}: `{key}` is already set in line {lines[key]}", "delete one")
                lines[key] = line
            return loader.construct_document(node), lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise TrainerError(f"{path}:{line}: not valid YAML: {error.problem}", "correct the line") from None
    except (yaml.YAMLError, TypeError) as error:
        raise TrainerError(f"{path}: not valid YAML: {error}", "correct the file") from None


def _names(path: Path, content: dict[Any, Any], lines: dict[Any, int]) -> list[str]:
    names = content.get("names")
    where = f"{path}:{lines.get('names', 1)}"
    if not names or not isinstance(names, (list, dict)):
        raise TrainerError(f"{where}: `names` must list the class names", "for example `names: [cat, dog]`")
    if isinstance(names, dict):
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            raise TrainerError(
                f"{where}: the classes of `names` must be numbered from 0 without a gap",
                f"number them 0 to {len(names) - 1}",
            )
        names = [names[k] for k in range(len(names))]
    names = [str(name) for name in names]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise TrainerError(f"{where}: class name `{twice[0]}` is given twice", "give each class a name of its own")
    if content.get("nc", len(names)) != len(names):
        raise TrainerError(
            f"{path}:{lines['nc']}: nc is {content['nc']}, but `names` has {len(names)} names",
            "correct one of them; `nc` may be left out",
        )
    return names


def _root(path: Path, content: dict[Any, Any], lines: dict[Any, int]) -> Path:
    """The folder that the splits are relative to: `path`, itself relative to data.yaml or to where we run."""
    entry = content.get("path")
    if entry in (None, ""):
        return path.parent
    for root in (path.parent / str(entry), Path(str(entry))):
        if root.is_dir():
            return root
    raise TrainerError(
        f"{path}:{lines['path']}: no such folder: {path.parent / str(entry)}", _fetch(content.get("download"))
    )


def _source(root: Path, entry: str, where: str, split: str, download: object) -> Path:
    candidates = [root / entry]
    if entry.startswith("../"):  # exported sets often count from a folder that their archive does not have
        candidates.append(root / entry[3:])
    for source in candidates:
        if source.exists():
            return source
    raise TrainerError(f"{where}: the {split} pictures are not there: {candidates[0]}", _fetch(download))


def _fetch(download: object) -> str:
    if not download:
        return "correct the path, or copy the data there"
    return f"nothing is downloaded or run for you; its `download:` says: {' '.join(str(download).split())[:200]}"
