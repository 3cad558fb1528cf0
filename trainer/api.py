"""Python interface of the trainer: `train` starts the ranks and returns their result, `load` returns a model."""

import collections
import csv
import dataclasses
import difflib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import contract
from trainer.config import DEFAULT_STRATEGY, Settings
from trainer.config.settings import option_of
from trainer.distributed.spawn import Line, local_ranks, rank_error, ranks_of, run_ranks
from trainer.engine.callbacks import Callback, dispatch
from trainer.engine.display import TrainingDisplay
from trainer.errors import TrainerError

if TYPE_CHECKING:
    from trainer.inference.model import Model

JOB = "python"  # with a job id, ranks print their events


@dataclass(frozen=True)
class Result:
    """Files and scores of a training. Scores are from the best epoch, nan without validation."""

    folder: Path
    best: Path
    last: Path
    scores: dict[str, float]  # map50 and map; top1 and top5; or miou and accuracy
    seconds: float
    history: list[dict[str, float]]  # rows of results.csv, one per epoch

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
    """Train like `trainer train`, with its options as keywords (`cos_lr=True`, `batch=64`), and return the result.

    Raises TrainerError with the message of the first failed rank. Ctrl-C stops all ranks.

    Args:
        device: one rank per device: `device=[0, 1]`
        ranks: number of ranks, where it differs from the number of devices: `device="cpu", ranks=2`
        callback: a Callback, called in this process; or a class or its import path, for the ranks
        options: `data` and `cfg` also accept a function of an importable module
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise TrainerError(
            "train() starts its own ranks, but RANK is set", "start the program without torchrun"
        )
    devices = str(device) if isinstance(device, (str, int)) else _text(list(device))
    count = ranks_of(devices, options.get("parallel", DEFAULT_STRATEGY)) if ranks is None else ranks
    if count < 1:
        raise TrainerError(f"ranks must be 1 or more, not {ranks}")
    local_callback = callback if isinstance(callback, Callback) else None
    options |= {"device": devices, "callback": "" if local_callback else callback}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CLUSTER_")} | {
        contract.JOB_ID: JOB
    }
    events = _EventReader(local_callback)
    failed = run_ranks(["train", *_arguments(options)], local_ranks(count), environment, events.line)
    events.screen.end_epoch()
    if failed:
        raise rank_error(failed, list(events.kept))
    if not events.done:
        raise TrainerError("the ranks ended without a result")
    best = Path(events.done["best"]).resolve()
    with best.with_name("results.csv").open(newline="", encoding="utf-8") as file:
        history = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    names = ("map50", "map", "top1", "top5", "miou", "accuracy")
    scores = {name: events.done[name] for name in names if name in events.done}
    return Result(best.parent, best, best.with_name("last.pt"), scores, events.done["seconds"], history)


def load(weights: str | Path, *, device: str | int = "", precision: str = "auto", cfg: str = "") -> "Model":
    """Load trained weights for predictions: `for found in load("best.pt").predict("images/"): print(found.boxes)`.

    Nothing in the file is executed. Raises TrainerError for a file that is missing, damaged or of another program.

    Args:
        weights: best.pt of a run, or any weights that `trainer train` accepts; the file says which task they are of
        device: "cpu", "cuda" or a GPU's number, by default the first GPU, or the CPU
        precision: "bf16", "fp32" or "auto": bf16 where the device supports it natively
        cfg: "package.module:function" that builds the model, for weights of your own model
    """
    from trainer.inference.model import Model  # torch and OpenCV

    return Model(str(weights), device=str(device), precision=precision, cfg=cfg)


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the keywords as command-line arguments; raise TrainerError for an unknown one."""
    known = [each.name for each in dataclasses.fields(Settings)] + ["cos_lr"]
    arguments: list[str] = []
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise TrainerError(
                f"train() has no option {name!r}",
                f"did you mean {near[0]!r}?" if near else "see: trainer train --help",
            )
        if value is True:
            arguments.append(option_of(name))
        elif value is not None and value is not False:  # 0 is a value
            arguments.append(f"{option_of(name)}={_text(value)}")
    return arguments


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return _import_path(value) if callable(value) else str(value)


def _import_path(value: Callable[..., Any]) -> str:
    """Return the import path of a function or class, for the ranks' processes."""
    module = value.__module__
    name = value.__qualname__
    if module == "__main__" or "<" in name:
        raise TrainerError(
            f"the ranks cannot import {name} from {module}",
            "define it at the top level of a module next to this file",
        )
    return f"{module}:{name}"


class _EventReader:
    """Reader of the ranks' output: shows it, calls the callback, keeps the result and the failures."""

    def __init__(self, callback: Callback | None) -> None:
        self.screen = TrainingDisplay(enabled=True, launched=False)
        self.done: dict[str, Any] = {}
        self._callback = callback
        self.kept = collections.deque[Line](maxlen=1000)  # for the error of a failed rank
        self._epoch = 0

    def line(self, line: Line) -> None:
        if line.stderr:
            self.kept.append(line)
        elif line.text.startswith(contract.EVENT_MARK):
            self._event(json.loads(line.text.removeprefix(contract.EVENT_MARK)), line)
        else:
            self.screen.print(line.text if line.rank == 0 else f"rank {line.rank}: {line.text}")

    def _event(self, event: dict[str, Any], line: Line) -> None:
        kind = event.pop("event")
        if kind == contract.FAILED:
            self.kept.append(line)
        if kind == contract.PROGRESS:
            if event["epoch"] != self._epoch:
                self._epoch = event["epoch"]
                self.screen.begin_epoch(event["epoch"], event["epochs"], event["steps"])
            shown = ("epoch", "epochs", "step", "steps", "loss", "images_per_s", "eta_s", "run_eta_s")
            self.screen.progress(**{key: _number(event[key]) for key in shown})
        if kind == contract.METRIC:
            self.screen.end_epoch()
        fields = {key: _number(value) for key, value in event.items()}
        if kind == contract.DONE:
            self.done = fields
        if self._callback:
            dispatch(self._callback, kind, fields)


def _number(value: Any) -> Any:
    """Return nan for null: JSON has no nan."""
    return math.nan if value is None else value
