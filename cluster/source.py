"""A YAML text as plain data that remembers where every key stands, so that an error can name the line."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from cluster.errors import UsageError

Key = tuple[str | int, ...]

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Source:
    """A file that is being read; `path` is how errors call it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lines: dict[Key, int] = {}

    def read(self, text: str, as_written: Callable[[Key], bool] = lambda _: False) -> Any:
        """What `yaml.safe_load` gives, but keys are strings and stand there once, and aliases are refused.

        Scalars for whose key `as_written` holds are the text that stands there (`010`, not 8).
        Raises UsageError that names the line.
        """
        try:
            # Aliases make loops and bombs. Without their mark there is none, and it need not be read twice.
            for event in yaml.parse(text, Loader=yaml.SafeLoader) if "*" in text else ():
                if isinstance(event, yaml.AliasEvent):
                    raise _at(event, "aliases (*name) are not read here")
            loader = yaml.SafeLoader(text)
            try:
                root = loader.get_single_node()
                return None if root is None else self._built(root, (), loader, as_written)
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"{self.path}:{mark.line + 1}" if mark else self.path
            raise UsageError(f"{where}: {error.problem or error.context}") from None
        except yaml.YAMLError as error:
            raise UsageError(f"{self.path}: {' '.join(str(error).split())}") from None
        except RecursionError:
            raise UsageError(f"{self.path}: nested too deeply") from None

    def where(self, key: Sequence[str | int]) -> str:
        """`cluster.yaml:7` for a key, or for the nearest one around it that is there."""
        known: Key = ()
        for part in key:
            if (*known, part) not in self._lines:
                break
            known = (*known, part)
        return f"{self.path}:{self._lines[known]}" if known in self._lines else self.path

    def error(self, key: Sequence[str | int], what: str, hint: str = "") -> UsageError:
        """An error that names the line and the key."""
        return UsageError(f"{self.where(key)}: {dotted(key)}: {what}", hint)

    def _built(self, node: yaml.Node, key: Key, loader: yaml.SafeLoader, as_written: Callable[[Key], bool]) -> Any:
        self._lines.setdefault(key, _line(node))
        if isinstance(node, yaml.MappingNode):
            made: dict[str, Any] = {}
            for name, value in node.value:
                if not isinstance(name, yaml.ScalarNode):
                    raise _at(name, "a key must be a word")
                # Keys are taken as they are written: `on` and `10` are names of machines, too.
                if name.value in made:
                    raise _at(name, f"{name.value!r} stands there twice")
                inner = (*key, name.value)
                self._lines[inner] = _line(name)
                made[name.value] = self._built(value, inner, loader, as_written)
            return made
        if isinstance(node, yaml.SequenceNode):
            return [self._built(item, (*key, index), loader, as_written) for index, item in enumerate(node.value)]
        return node.value if as_written(key) else loader.construct_object(node, deep=True)


def dotted(key: Sequence[str | int]) -> str:
    """`nodes.gpu-a.gpus`; what is no plain word stands in quotes."""
    return ".".join(part if isinstance(part, str) and _WORD.fullmatch(part) else repr(part) for part in key)


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _at(node: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
