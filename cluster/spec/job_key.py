"""The key of an option in job.yaml, as far as it differs from the command line. Pure, and without pydantic."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cluster.errors import UsageError
from cluster.spec import duration
from cluster.spec.counts import gpus_per_node, node_range
from cluster.spec.shell_words import split

#: The types that YAML may give to a value that is read as a text.
Scalar = str | float | bool | None


@dataclass(frozen=True)
class Key:
    """How job.yaml has an option. Without one, the key has the option's name, type and help.

    `name` is the key, if it is not the name of the field. `takes` is the type of the value in the file, which `read`
    converts to the option's, and `write` converts back. `item` checks each text of a list. All of them may raise
    UsageError. `choices` are the only valid texts, and `least` is the smallest number.
    """

    name: str = ""
    help: str = ""
    takes: Any = None
    read: Callable[[Any], Any] | None = None
    write: Callable[[Any], Any] = lambda value: value
    item: Callable[[str], object] | None = None
    choices: tuple[str, ...] = ()
    least: int | None = None


def words(**more: Any) -> Key:
    """Return the key of an option that has a list of words; a text is split as by a shell."""
    return Key(takes=str | list[str], read=_words, **more)


def command() -> Key:
    """Return the key of an option that is a text of shell words; the file may list the words."""
    return Key(takes=str | list[str], read=lambda value: shlex.join(_words(value)))


def names() -> Key:
    """Return the key of an option that is a text of names with commas; the file may list the names."""
    return Key(
        takes=str | list[str], read=_comma_separated, write=lambda text: text.replace(" ", "").split(",")
    )


def scalar(check: Callable[[str], object] = str, write: Callable[[str], object] = str) -> Key:
    """Return the key of a text that YAML may take for a number. `check` raises UsageError for a wrong one."""

    def read(value: Any) -> Any:
        text = "" if value is None else value
        if isinstance(text, str) and text:
            check(text)
        return text

    return Key(takes=Scalar, read=read, write=write)


def nodes() -> Key:
    """Return the key of --nodes."""
    return scalar(lambda text: node_range(text, 1), lambda text: int(text) if text.isdecimal() else text)


def gpus() -> Key:
    """Return the key of --gpus, where a list has one number per node."""
    return Key(takes=int | list[int] | Literal["all"], read=_gpu_counts, write=_numbers, least=1)


def time(option: str) -> Key:
    """Return the key of an option that is a time such as 90s."""
    return scalar(lambda text: duration.seconds(text, option))


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return split(value, repr(value))
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise UsageError(f"{value!r} is not a text or a list of words", "for example: train.py --lr 0.1")
    return value


def _comma_separated(value: Any) -> Any:
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return ",".join(value) if is_list else value


def _gpu_counts(value: Any) -> str:
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(isinstance(number, str | int) for number in numbers):
        raise UsageError(
            f"{value!r} is not a number, a list of numbers or all", "for example: gpus: 2, or [2, 1]"
        )
    text = ",".join(map(str, numbers))
    gpus_per_node(text)
    return text


def _numbers(text: str) -> int | list[int] | str:
    if text == "all":
        return text
    numbers = [int(number) for number in text.split(",")]
    return numbers if numbers[1:] else numbers[0]
