"""YAML files of keys and values, with the line of each key."""

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.config.faults import BadData, Fault
from trainer.config.text_file import read_text


@dataclass(frozen=True)
class YamlFile:
    """The keys of a file with their values, and the line of each."""

    path: Path
    values: dict[Any, Any]
    lines: dict[Any, int]

    def fault(self, key: Any, what: str, hint: str, *, warning: bool = False) -> Fault:
        """Return a fault in the line of `key`, or in the first line if the file does not have the key."""
        return Fault(str(self.path), self.lines.get(key, 1), what, hint, warning)

    def unknown(self, known: Collection[str]) -> list[Fault]:
        """Return a fault for every key that is not in `known`, with the most similar known key."""
        faults = []
        for key in self.values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = (
                    f"did you mean `{near[0]}`?"
                    if near
                    else f"known keys: {', '.join(known)}; a remark can be a comment: # ..."
                )
                faults.append(self.fault(key, f"unknown key `{key}`", hint))
        return faults


def read(path: Path, texts: str = "") -> YamlFile:
    """Read a file of keys and values. Items of the key `texts` and their keys stay text, also `no`, `010`, `1:30`.

    Raises BadData for invalid YAML, a duplicate key, or content without keys.
    """
    try:
        loader = yaml.SafeLoader(read_text(path))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise BadData(
                [Fault(str(path), 1, "not a mapping of keys to values", "write `key: value` lines")]
            )
        lines: dict[Any, int] = {}
        for key_node, value in node.value:
            key = loader.construct_object(key_node)
            line = key_node.start_mark.line + 1
            if key in lines:
                raise BadData(
                    [Fault(str(path), line, f"`{key}` is already set in line {lines[key]}", "delete one")]
                )
            lines[key] = line
            if key == texts and isinstance(value, yaml.CollectionNode):
                _keep_texts(value, path)
        return YamlFile(path, loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BadData(
            [Fault(str(path), line, f"not valid YAML: {error.problem}", "correct the line")]
        ) from None
    except OSError as error:
        raise BadData([Fault(str(path), 0, error.strerror or str(error), "check the path")]) from None
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:  # ValueError: 2024-13-45
        raise BadData([Fault(str(path), 0, f"cannot be read as YAML: {error}", "use a YAML file")]) from None


def _keep_texts(node: yaml.CollectionNode, path: Path) -> None:
    """Let the scalars of a list or mapping stay text; raise BadData for a key that is there twice."""
    lines: dict[str, int] = {}
    for item in node.value:
        scalars = item if isinstance(item, tuple) else (item,)
        for scalar in scalars:
            if isinstance(scalar, yaml.ScalarNode):
                scalar.tag = "tag:yaml.org,2002:str"
        if isinstance(item, tuple) and isinstance(item[0], yaml.ScalarNode):
            key = item[0].value
            line = item[0].start_mark.line + 1
            if key in lines:
                raise BadData(
                    [Fault(str(path), line, f"`{key}` is already set in line {lines[key]}", "delete one")]
                )
            lines[key] = line
