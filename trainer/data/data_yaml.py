"""The data.yaml of a YOLO-format data set: where the pictures are and what the classes are called."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.data.faults import BadData, Fault

# `roboflow` is what that site's exports add about themselves.
_KEYS = ("path", "train", "val", "test", "nc", "names", "download", "sha256", "roboflow")


@dataclass(frozen=True)
class DataYaml:
    """A checked data.yaml; `sources` are the folders and lists of pictures of one split."""

    path: Path
    names: list[str]
    sources: list[Path]
    line: int  # the one that names the sources


@dataclass(frozen=True)
class Content:
    """The keys of a data.yaml as they stand there, and the line of each."""

    path: Path
    values: dict[Any, Any]
    lines: dict[Any, int]

    def fault(self, key: str, what: str, hint: str) -> Fault:
        """A fault in the line of `key`, or in the first one where there is no such key."""
        return Fault(str(self.path), self.lines.get(key, 1), what, hint)

    def entries(self, split: str) -> list[Any]:
        """What `split` names: one source or a list of them; empty where it names none."""
        value = self.values.get(split)
        return [] if value in (None, "") else value if isinstance(value, list) else [value]

    def roots(self) -> list[Path]:
        """Where the splits may count from, the first choice first: `path`, relative to data.yaml or to where we run."""
        entry = self.values.get("path")
        if entry in (None, ""):
            return [self.path.parent]
        return [self.path.parent / str(entry), Path(str(entry))]


def read_data_yaml(path: Path, split: str) -> DataYaml:
    """Read and check `path` for `split` (train or val); BadData with all faults, each with line and next step."""
    content = load_data_yaml(path)
    faults = [_unknown(content, key) for key in content.values if key not in _KEYS]
    names = _names(content, faults)
    sources = _sources(content, split, faults)
    if faults:
        raise BadData(faults)
    return DataYaml(path, names, sources, content.lines[split])


def load_data_yaml(path: Path) -> Content:
    """The mapping in `path` and the line of each of its keys; BadData where there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = "give the path of a data.yaml, or `digits` for the built-in data set"
        raise BadData([Fault(str(path), 0, "no such data set", hint)]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadData([Fault(str(path), 0, f"cannot be read: {error}", "is it a data.yaml?")]) from None
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if not isinstance(node, yaml.MappingNode):
                raise BadData([Fault(str(path), 1, "not a mapping of keys to values", f"keys: {', '.join(_KEYS)}")])
            lines: dict[Any, int] = {}
            for key_node, _ in node.value:
                key = loader.construct_object(key_node)
                line = key_node.start_mark.line + 1
                if key in lines:
                    what = f"`{key}` is already set in line {lines[key]}"
                    raise BadData([Fault(str(path), line, what, "delete one")])
                lines[key] = line
            for key_node, value in node.value:
                if key_node.value == "names" and isinstance(value, yaml.CollectionNode):
                    _as_written(value)
            return Content(path, loader.construct_document(node), lines)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BadData([Fault(str(path), line, f"not valid YAML: {error.problem}", "correct the line")]) from None
    except (yaml.YAMLError, TypeError, ValueError) as error:  # a date that there is not
        raise BadData([Fault(str(path), 0, f"not valid YAML: {error}", "correct the file")]) from None


def _as_written(names: yaml.CollectionNode) -> None:
    """Make class names text: `no`, `010` and `1:30` are no truth value and no numbers here."""
    for child in names.value:
        name = child[1] if isinstance(child, tuple) else child
        if isinstance(name, yaml.ScalarNode):
            name.tag = "tag:yaml.org,2002:str"


def _unknown(content: Content, key: Any) -> Fault:
    near = difflib.get_close_matches(str(key), _KEYS, 1)
    hint = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(_KEYS)}; delete the line"
    return content.fault(key, f"unknown key `{key}`", hint)


def _names(content: Content, faults: list[Fault]) -> list[str]:
    names = content.values.get("names")
    if not names or not isinstance(names, (list, dict)):
        hint = "for example `names: [cat, dog]`"
        faults.append(content.fault("names", "`names` must list the class names", hint))
        return []
    if isinstance(names, dict):
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            what = "the classes of `names` must be numbered from 0 without a gap"
            faults.append(content.fault("names", what, f"number them 0 to {len(names) - 1}"))
            return []
        names = [names[k] for k in range(len(names))]
    names = [str(name) for name in names]
    if not all(names):
        faults.append(content.fault("names", "a class of `names` has no name", "give each class a name of its own"))
    for name in sorted({name for name in names if names.count(name) > 1}):
        faults.append(
            content.fault("names", f"class name `{name}` is given twice", "give each class a name of its own")
        )
    nc = content.values.get("nc", len(names))
    if nc != len(names):
        what = f"nc is {nc}, but `names` has {len(names)} names"
        faults.append(content.fault("nc", what, "correct one of them; `nc` may be left out"))
    return names


def _sources(content: Content, split: str, faults: list[Fault]) -> list[Path]:
    """The folders and lists of `split` that are there; what is not there is added to `faults`."""
    entries = content.entries(split)
    if not entries:
        hint = f"add a line such as `{split}: images/{split}`"
        faults.append(content.fault(split, f"no `{split}` pictures are named", hint))
    elif not all(isinstance(entry, str) for entry in entries):
        what = f"`{split}` must be a path or a list of paths"
        faults.append(content.fault(split, what, "see the line's indentation"))
        return []
    roots = content.roots()
    root = next((root for root in roots if root.is_dir()), None)
    if root is None:
        faults.append(content.fault("path", f"no such folder: {roots[0]}", _where_to_find(content, split)))
        return []
    found = []
    for entry in entries:
        candidates = places(root, entry)
        source = next((source for source in candidates if source.exists()), None)
        if source:
            found.append(source)
        else:
            what = f"the {split} pictures are not there: {candidates[0]}"
            faults.append(content.fault(split, what, _where_to_find(content, split)))
    return found


def places(root: Path, entry: str) -> list[Path]:
    """Where a source named in data.yaml may be, the first choice first."""
    # Exported sets often count from a folder that their archive does not have.
    return [root / entry] + ([root / entry[3:]] if entry.startswith("../") else [])


def _where_to_find(content: Content, split: str) -> str:
    if content.values.get("download") and split != "test":  # often kept elsewhere
        return f"`trainer data download --data {content.path}` fetches them; so does training"
    return "correct the path, or copy the data there"
