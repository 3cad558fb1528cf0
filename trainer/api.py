"""The trainer for Python programs and notebooks: one call that starts its own ranks and returns what came out."""

from __future__ import annotations

import collections
import csv
import difflib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import contract
from trainer.callback import Callback, tell
from trainer.errors import TrainerError
from trainer.ranks import Line, ranks_of, run_ranks
from trainer.training.screen import Screen

JOB = "python"  # any job id makes the ranks tell their events


@dataclass(frozen=True)
class Result:
    """What a training left behind; the scores are those of its best epoch, nan without validation."""

    folder: Path
    best: Path
    last: Path
    scores: dict[str, float]  # map50 and map; top1, top5 of a classifier; miou, accuracy of masks
    seconds: float
    history: list[dict[str, float]]  # results.csv, a row per epoch

    @property
    def map50(self) -> float:
        """mAP at IoU 0.5 of a detector."""
        return self.scores["map50"]

    @property
    def map(self) -> float:
        """mAP over IoU 0.50:0.05:0.95 of a detector."""
        return self.scores["map"]


def train(
    *,
    device: str | int | Sequence[int] = "",
    ranks: int | None = None,
    callback: str | Callback = "",
    **options: Any,
) -> Result:
    """Train as `trainer train` does and wait for the end; its options are the keywords (`cos_lr=True`, `batch=64`).

    One rank for each of several devices (`device=[0, 1]`), or `ranks` of them (`device="cpu"`). `data` and `cfg` also
    take a function of an importable module, or its import path; so does `callback`, and an instance of Callback, which
    is told in this process. Raises TrainerError with the message of the rank that failed; Ctrl-C stops all ranks.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise TrainerError(
            "train() starts its own ranks, and this is already one", "start the program without torchrun"
        )
    devices = str(device) if isinstance(device, (str, int)) else _text(list(device))
    count = ranks_of(devices, options.get("parallel", "ddp")) if ranks is None else ranks
    if count < 1:
        raise TrainerError(f"ranks is {ranks}, it must be 1 or more")
    here = callback if isinstance(callback, Callback) else None
    options |= {"device": devices, "callback": "" if here else callback}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CLUSTER_")}
    told = _Told(count, here)
    failed = run_ranks(["train", *_arguments(options)], count, {**environment, contract.JOB_ID: JOB}, told.line)
    told.screen.end_epoch()
    if failed:
        raise told.failure(failed)
    if not told.done:
        raise TrainerError("the ranks ended without a result")
    best = Path(told.done["best"]).resolve()
    return Result(
        folder=best.parent,
        best=best,
        last=best.with_name("last.pt"),
        scores={k: v for k, v in told.done.items() if k in ("map50", "map", "top1", "top5", "miou", "accuracy")},
        seconds=told.done["seconds"],
        history=_history(best.with_name("results.csv")),
    )


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """Keywords as the command line's words; one that the command line does not know is an error."""
    import typer

    from trainer.cli import app

    command: Any = typer.main.get_command(app)
    known = {parameter.name: parameter for parameter in command.commands["train"].params}
    words: list[str] = []
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise TrainerError(
                f"train() has no option {name!r}", f"did you mean {near[0]!r}?" if near else "see: trainer train --help"
            )
        option = known[name]
        if option.is_flag:
            if value:
                words.append(option.opts[0])
            elif option.secondary_opts:
                words.append(option.secondary_opts[0])
        elif value is not None:
            words.append(f"{option.opts[0]}={_text(value)}")
    return words


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return _import_path(value) if callable(value) else str(value)


def _import_path(value: Callable[..., Any]) -> str:
    """Where the ranks, which are other processes, can import a function or class."""
    module, name = value.__module__, value.__qualname__
    if module == "__main__" or "<" in name:
        raise TrainerError(
            f"the ranks cannot import {name} from {module}", "put it into a file beside this one, at its top level"
        )
    return f"{module}:{name}"


class _Told:
    """What the ranks have said: shown, handed to the callback, and kept for the result or the error."""

    def __init__(self, count: int, callback: Callback | None) -> None:
        self.screen = Screen(lit=True, listening=False)
        self.done: dict[str, Any] = {}
        self._count, self._callback = count, callback
        self._failures: list[dict[str, Any]] = []
        self._stderr = [collections.deque[str](maxlen=100) for _ in range(count)]
        self._epoch = 0

    def line(self, line: Line) -> None:
        """Take one line of a rank."""
        if line.stderr:
            self._stderr[line.rank].append(line.text)
        elif line.text.startswith(contract.EVENT_MARK):
            self._event(json.loads(line.text.removeprefix(contract.EVENT_MARK)))
        else:
            self.screen.say(line.text if line.rank == 0 else f"rank {line.rank}: {line.text}")

    def _event(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == contract.FAILED:
            self._failures.append(event)
        if kind == contract.PROGRESS:
            if event["epoch"] != self._epoch:
                self._epoch = event["epoch"]
                self.screen.begin_epoch(event["epoch"], event["epochs"], event["steps"])
            shown = ("epoch", "epochs", "step", "steps", "loss", "images_per_s", "eta_s")
            self.screen.progress(**{key: _number(event[key]) for key in shown})
        if kind == contract.METRIC:
            self.screen.end_epoch()
        fields = {key: _number(value) for key, value in event.items()}
        if kind == contract.DONE:
            self.done = fields
        if self._callback:
            tell(self._callback, kind, fields)

    def failure(self, failed: Mapping[int, int]) -> TrainerError:
        """The error of the rank that others failed for, if any: an error of the user, a signal, a defect."""
        told = {event["rank"]: event for event in reversed(self._failures)}

        def precedence(rank: int) -> tuple[int, float]:
            event = told.get(rank)
            if event:
                if event["exit_code"] == contract.EXIT_BAD_INPUT:
                    return 0, event["time"]
                return 5 if event["hint"] else 2, event["time"]  # a hint is for those that have lost another rank
            if failed[rank] == -signal.SIGABRT and any("NCCL" in line for line in self._stderr[rank]):
                return 4, 0  # how NCCL's watchdog ends a rank that has lost another one
            return 1 if failed[rank] < 0 else 3, 0

        rank = min(failed, key=precedence)
        where = f"rank {rank}" if self._count > 1 else "the training"
        code, event = failed[rank], told.get(rank)
        if event and event["exit_code"] == contract.EXIT_BAD_INPUT:
            return TrainerError(event["error"], event["hint"])
        if code == contract.EXIT_RUN_ME_AGAIN:
            return TrainerError("the training was stopped by a signal, after a checkpoint", "go on with resume")
        print(*self._stderr[rank], sep="\n", file=sys.stderr)  # its traceback
        if event:
            return TrainerError(f"{where}: {event['error']}", event["hint"])
        return TrainerError(f"{where} ended with " + (signal.Signals(-code).name if code < 0 else f"exit {code}"))


def _number(value: Any) -> Any:
    """JSON has no word for nan, which the events write as null."""
    return math.nan if value is None else value


def _history(path: Path) -> list[dict[str, float]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
