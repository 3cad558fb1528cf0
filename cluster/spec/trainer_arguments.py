"""The trainer's arguments: which of them are paths, and what else the trainer reads with those. Pure."""

import posixpath
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from cluster import contract
from cluster.errors import UsageError
from cluster.spec.here import Here
from cluster.spec.mount import Mount
from cluster.spec.paths import absolute

#: The dataset's option, in the trainer and in `yolo`.
_DATA = ("--data", "data=")


def with_paths(
    given: Sequence[str], here: Here, mounts: Sequence[Mount], folders: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Return the trainer's arguments with absolute paths, and what to mount: these paths, and what those files need.

    Paths below `folders` exist on the nodes.
    """
    there = (*(mount.target for mount in mounts), *folders)
    arguments: list[str] = []
    paths: list[str] = []
    for before, option, argument in _words(given):
        path = absolute(argument, here.cwd)
        is_mounted = any(f"{argument}/".startswith(f"{mounted}/") for mounted in there)
        folder_of_data = option in _DATA and argument not in contract.DATA_SETS and here.is_folder(path)
        if here.exists(path) and ("/" in argument or "." in argument or folder_of_data):
            paths += [path, *_needed_by(option, path, here)]
            argument = path
        elif (
            "/" in argument and option in contract.INPUT_OPTIONS and not is_mounted and "://" not in argument
        ):
            shown = f"{before}{argument}" if before else f"{option} {argument}"
            raise UsageError(f"{shown}: no such file", f"the full path would be {path}")
        arguments.append(before + argument)
    paths = list(dict.fromkeys(paths))
    folders = [path for path in paths if here.is_folder(path)]
    folders += [mount.source for mount in mounts if mount.source == mount.target]
    return arguments, [path for path in paths if not any(path.startswith(f"{folder}/") for folder in folders)]


def data_set(command: Sequence[str]) -> str:
    """Return the data set of a trainer's command, "" if it names none."""
    return next((word for _, option, word in _words(command) if option in _DATA), "")


def _words(arguments: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (text before it, option, word) for each word, where the word is the value of the option, if it has one.

    `--data x` and `--data=x` become two words, and `data=x` stays one: its option is `data=`.
    """
    option = ""
    for word in arguments:
        name, mark, value = word.partition("=")
        if mark and name in contract.INPUT_OPTIONS:
            yield "", option, name
            yield "", name, value
        elif mark and f"{name}=" in contract.INPUT_OPTIONS:
            yield f"{name}=", f"{name}=", value
        else:
            yield "", option, word
        option = word


def _needed_by(option: str, path: str, here: Here) -> list[str]:
    """Return the paths that the trainer also reads if the value of an option is the file `path`."""
    if option in _DATA and path.endswith((".yaml", ".yml")):
        return _data_folders(path, here)
    before = str(PurePosixPath(path).with_name(contract.PREVIOUS_CHECKPOINT))
    return [before] if option == "--resume" and before != path and here.exists(before) else []


def _data_folders(path: str, here: Here) -> list[str]:
    """Return the folders of a data.yaml that exist: its `path`, and those with the images and labels of its splits.

    docs/reference/contract.md lists these keys. The trainer reports a data.yaml that cannot be read.
    """
    import yaml  # most jobs have no data.yaml, and the import is slow

    try:
        content = yaml.safe_load(here.read(path) or b"")
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date, or not UTF-8
        return []
    values = content if isinstance(content, dict) else {}
    root = absolute(str(values.get("path") or "."), posixpath.dirname(path))
    folders = [root] if values.get("path") else []
    for split in ("train", "val", "test"):
        value = values.get(split)
        for entry in value if isinstance(value, list) else [value]:
            if not isinstance(entry, str):
                continue
            # Exported data sets often have paths relative to a folder that their archive does not contain.
            sources = [absolute(text, root) for text in (entry, entry.removeprefix("../"))]
            source = next(filter(here.exists, sources), "")
            top = f"{source}/".rpartition("/images/")[0]  # labels are in a folder beside `images`
            if source:
                folders.append(top or (source if here.is_folder(source) else posixpath.dirname(source)))
    return [folder for folder in folders if here.is_folder(folder)]
