"""Arguments of `yolo`: the words after it, as its own command line reads them."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import TrainerError

TASKS = ("detect", "segment", "classify", "pose", "obb")
#: The tasks and modes of the package that are not run on several ranks.
OTHER_TASKS = ("semantic", "depth")
OTHER_MODES = ("val", "predict", "export", "track", "benchmark")
EXAMPLE = "yolo detect train data=coco8.yaml model=yolo26n.pt epochs=100"


@dataclass(frozen=True)
class Arguments:
    """The task, "" if the model decides it, and the values of the other arguments as they were typed."""

    task: str
    values: Mapping[str, str]


def parse(words: Sequence[str], defaults: Mapping[str, Any]) -> Arguments:
    """Parse the words of a training: `detect train data=coco8.yaml epochs=3 exist_ok`.

    `defaults` are the package's arguments; the name alone of one with a truth value means True. Raise TrainerError for
    another mode than train, and for words that are no arguments. The names of `NAME=VALUE` are not checked.
    """
    values: dict[str, str] = {}
    for word in words:
        # The package accepts what people paste from a Python call or from another program's command line.
        text = word.removeprefix("--").removesuffix(",")
        name, mark, value = text.partition("=")
        if mark and not value:
            raise TrainerError(f"yolo: {text} has no value", f"for example: {EXAMPLE}")
        if mark:
            values[name] = value
        elif text in (*TASKS, *OTHER_TASKS):
            values["task"] = text
        elif text in ("train", *OTHER_MODES):
            values["mode"] = text
        elif isinstance(defaults.get(text), bool) or text == "resume":
            values[text] = "True"
        elif text in defaults:
            raise TrainerError(f"yolo: {text} has no value", f"give it one: {text}=VALUE")
        else:
            known = (*TASKS, *OTHER_TASKS, "train", *OTHER_MODES, *defaults)
            near = difflib.get_close_matches(text, known, 1)
            raise TrainerError(
                f"yolo: {word}: no such argument", f"did you mean {near[0]}?" if near else EXAMPLE
            )
    _check_mode(values.pop("mode", ""))
    task = values.pop("task", "")
    if task and task not in TASKS:
        hint = f"it trains {', '.join(TASKS[:-1])} and {TASKS[-1]}; for others, use the program `yolo` on one machine"
        raise TrainerError(f"yolo {task} train: not a task that trains on several machines", hint)
    return Arguments(task, values)


def _check_mode(mode: str) -> None:
    if not mode:
        raise TrainerError("yolo: no mode was given", f"it trains: {EXAMPLE}")
    if mode in OTHER_MODES:
        hint = (
            f"use the program itself, where `ultralytics` is installed: yolo {mode} model=weights/best.pt ..."
        )
        raise TrainerError(f"yolo {mode}: only `train` runs on several machines", hint)
    if mode != "train":
        raise TrainerError(f"yolo mode={mode}: no such mode", f"it trains: {EXAMPLE}")


def check_batch(batch: Any, ranks: int) -> None:
    """Raise TrainerError unless `batch` images, which all ranks share, are a whole number for each of `ranks`."""
    if ranks == 1:
        return
    example = f"batch={16 * ranks}"
    if not isinstance(batch, int) or batch < 1:
        raise TrainerError(
            f"batch={batch}: the batch size cannot be chosen automatically on {ranks} ranks",
            f"give the number of images of all ranks together, for example {example}",
        )
    if batch % ranks:
        lower = batch - batch % ranks
        upper = batch - batch % ranks + ranks
        near = f"{lower} or {upper}" if lower else f"{upper}"
        raise TrainerError(f"batch={batch} cannot be divided among {ranks} ranks", f"use {near}")


def device_text(value: Any) -> str:
    """Return `device=` as the option --device has it: [0, 1] is "0,1"; None, which lets others choose, is ""."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "" if value is None else str(value).replace(" ", "")


def wanted_device(given: str, launched: str, ranks: int) -> str:
    """Return the device of a node's ranks: that of `device=` (`given`), else that of the launch.

    `launched` is the launcher's --device, and `ranks` the number of ranks on the node, 0 without a launcher. Raise
    TrainerError if they contradict each other.
    """
    if not given or not ranks:
        return given or launched
    hint = "omit device=, because the launch decides: clusterctl launch --gpus N --device cuda (or cpu)"
    if launched and (given == "cpu") != (launched == "cpu"):
        raise TrainerError(f"device={given}, but the job was launched with --device {launched}", hint)
    if given[0].isdecimal() and given.count(",") + 1 != ranks:
        listed = "1 GPU" if "," not in given else f"{given.count(',') + 1} GPUs"
        raise TrainerError(
            f"device={given} names {listed}, but this node has {ranks} ranks, one for each GPU", hint
        )
    return given
