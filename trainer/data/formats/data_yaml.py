"""The data.yaml of a YOLO-format dataset: image folders or lists, and class names."""

# ruff: noqa: PTH100 (abspath follows no links)

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import yaml_file
from trainer.config.faults import BadData, Fault

SPLITS = ("train", "val")  # that training needs

# Roboflow's exports contain the key `roboflow`, and datasets of poses the last three.
_KEYS: tuple[str, ...] = (
    "path",
    "train",
    "val",
    "test",
    "nc",
    "names",
    "extra_columns",
    "download",
    "sha256",
)
_KEYS += ("roboflow", "kpt_shape", "kpt_names", "flip_idx")


@dataclass(frozen=True)
class DataYaml:
    """A checked data.yaml; `sources` are the image folders and lists of one split."""

    path: Path
    names: list[str]
    sources: list[Path]
    line: int  # line of the split's key
    extra_columns: int | None  # unused numbers after the box in rows with more than a box; None: not declared
    warnings: list[Fault]


class Content(yaml_file.YamlFile):
    """The unchecked keys and values of a data.yaml."""

    def entries(self, split: str) -> list[Any]:
        """Return the sources of `split`; empty if it has none."""
        value = self.values.get(split)
        return [] if value in (None, "") else value if isinstance(value, list) else [value]

    def root(self) -> Path:
        """Return the folder of the sources: `path` relative to data.yaml, else to the working directory."""
        relative = Path(str(self.values.get("path") or "."))
        beside = self.path.parent / relative
        return relative if not beside.is_dir() and relative.is_dir() else beside


def read_data_yaml(path: Path, split: str) -> DataYaml:
    """Read and check `path` for `split` (train or val); raise BadData with all faults."""
    content = load_data_yaml(path)
    faults = content.unknown(_KEYS)
    names = _names(content, faults)
    sources = _sources(content, split, faults)
    keypoint_values = _keypoint_values(content, faults)
    extra = _extra_columns(content, keypoint_values, faults)
    if faults:
        raise BadData(faults)
    warnings = []
    if keypoint_values:
        what = "the key points of the labels are not used: a detector is trained on their boxes"
        warnings.append(content.fault("kpt_shape", what, "nothing needs to be changed", warning=True))
    return DataYaml(path, names, sources, content.lines[split], extra, warnings)


def load_data_yaml(path: Path) -> Content:
    """Return the mapping in `path` with the line of each key; raise BadData if it has none."""
    if not path.exists():
        hint = "give the path of a data.yaml, or `digits` for the built-in dataset"
        raise BadData([Fault(str(path), 0, "no such dataset", hint)])
    found = yaml_file.read(path, texts="names")
    return Content(found.path, found.values, found.lines)


def _names(content: Content, faults: list[Fault]) -> list[str]:
    names = content.values.get("names")
    if not names or not isinstance(names, (list, dict)):
        hint = "for example `names: [cat, dog]`"
        faults.append(content.fault("names", "`names` must list the class names", hint))
        return []
    if isinstance(names, dict):
        numbered = {int(key): name for key, name in names.items() if isinstance(key, str) and key.isdecimal()}
        if len(numbered) < len(names) or set(numbered) != set(range(len(names))):
            what = "the classes of `names` must be numbered from 0 without a gap"
            faults.append(content.fault("names", what, f"number them 0 to {len(names) - 1}"))
            return []
        names = [numbered[k] for k in range(len(names))]
    names = [str(name) for name in names]
    if not all(names):
        faults.append(
            content.fault("names", "a class of `names` has no name", "give each class a unique name")
        )
    for name in sorted({name for name in names if names.count(name) > 1}):
        faults.append(
            content.fault("names", f"class name `{name}` is given twice", "give each class a unique name")
        )
    nc = content.values.get("nc", len(names))
    nc = int(nc) if isinstance(nc, str) and nc.isdecimal() else nc
    if nc != len(names):
        what = f"nc is {nc}, but `names` has {len(names)} names"
        faults.append(content.fault("nc", what, "correct one of them; `nc` may be left out"))
    return names


def _keypoint_values(content: Content, faults: list[Fault]) -> int:
    """Return the numbers per row that `kpt_shape` declares: [key points, 2 or 3 values of each]."""
    shape = content.values.get("kpt_shape")
    if shape is None:
        return 0
    numbers = shape if isinstance(shape, list) and all(type(number) is int for number in shape) else []
    if len(numbers) != 2 or numbers[0] < 1 or numbers[1] not in (2, 3):
        what = f"kpt_shape must be the number of key points and of the values of each (2 or 3), not {shape}"
        faults.append(content.fault("kpt_shape", what, "for example `kpt_shape: [17, 3]`"))
        return 0
    return int(numbers[0] * numbers[1])


def _extra_columns(content: Content, keypoint_values: int, faults: list[Fault]) -> int | None:
    """Return how many numbers after the box are left out: the key points' or those of `extra_columns`."""
    number = content.values.get("extra_columns")
    if number is None:
        return keypoint_values or None
    if type(number) is not int or number < 0:
        what = f"extra_columns must be how many numbers follow the box in a row, not {number}"
        faults.append(
            content.fault("extra_columns", what, "for example `extra_columns: 1`, for a confidence")
        )
        return None
    if keypoint_values and number != keypoint_values:
        what = f"extra_columns is {number}, but the key points of kpt_shape are {keypoint_values} numbers"
        faults.append(content.fault("extra_columns", what, "remove one of the two keys"))
    return number


def _sources(content: Content, split: str, faults: list[Fault]) -> list[Path]:
    """Return the existing folders and lists of `split`; add missing ones to `faults`."""
    entries = content.entries(split)
    if not entries:
        hint = f"add a line such as `{split}: images/{split}`"
        faults.append(content.fault(split, f"no `{split}` images are named", hint))
    elif not all(isinstance(entry, str) for entry in entries):
        what = f"`{split}` must be a path or a list of paths"
        faults.append(content.fault(split, what, "check the line's indentation"))
        return []
    root = content.root()
    if not root.is_dir():
        faults.append(content.fault("path", f"no such folder: {root}", _missing_hint(content, split, root)))
        return []
    found = []
    for entry in entries:
        candidates = source_candidates(root, entry)
        source = next((source for source in candidates if source.exists()), None)
        if source:
            found.append(source)
        else:
            what = f"the {split} images are missing: {candidates[0]}"
            faults.append(content.fault(split, what, _missing_hint(content, split, candidates[0])))
    return found


def source_candidates(root: Path, entry: str) -> list[Path]:
    """Return the candidate paths of a source in data.yaml, in order of preference."""
    # Exported datasets often have paths relative to a folder that their archive does not contain, or those of Windows.
    written = entry.replace("\\", "/")
    found = [root / entry, root / written] if written != entry else [root / entry]
    return [*found, root / written[3:]] if written.startswith("../") else found


def _missing_hint(content: Content, split: str, path: Path) -> str:
    if content.values.get("download") and split != "test":  # archives often lack the test split
        return f"`trainer data download --data {content.path}` fetches them; so does training"
    return f"correct the path, or copy the data there{mount_hint(path, content.path)}"


def mount_hint(path: str | Path, data_yaml: Path) -> str:
    """Return what to do in a container about a missing path that is not below the folder of the data.yaml, else ""."""
    folder = Path(os.path.abspath(data_yaml)).parent
    path = Path(os.path.abspath(path))
    inside = folder in (path, *path.parents)
    return "" if inside else f"; in a container, mount it: clusterctl launch --mount {path}"
