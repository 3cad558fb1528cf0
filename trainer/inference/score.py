"""Scores of a trained model of any task but boxes (see validate.py), from however many ranks share the work."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import contract, dist
from trainer.config import Settings, preset_for
from trainer.errors import TrainerError
from trainer.events import Events
from trainer.progress import track
from trainer.tasks import Scores, Task, open_task
from trainer.tasks.inference import type_for
from trainer.weights import checkpoint


@dataclass(frozen=True)
class Scored:
    """What came out: scores, the task that they are of, milliseconds per picture, the folder if one was made."""

    scores: Any
    task: Task
    imgsz: int
    ms_per_picture: float
    folder: Path | None

    def as_json(self) -> str:
        """The result for scripts, in one line."""
        scores: Scores = self.scores
        classes = dict(zip(self.task.names, scores.by_class(self.task.names), strict=True))
        named = {name: None if value != value else value for name, value in classes.items()}
        content = {**scores.columns(), "per_class": named, "imgsz": self.imgsz, "ms_per_picture": self.ms_per_picture}
        return json.dumps({**content, "folder": str(self.folder) if self.folder else None})


def score(settings: Settings, *, plots: bool) -> Scored | None:
    """Score `settings.weights` on the validation pictures of `settings.data`; the result on rank 0, None elsewhere.

    With `plots`, pictures and diagrams are written into a new folder of the project.
    """
    s, begin = settings, time.monotonic()
    events = Events(os.environ)
    world = dist.world_of(os.environ)
    device = dist.pick_device(s.device, world)
    dist.limit_threads(world)
    task = open_task(dataclasses.replace(s, batch=s.batch * world.size))  # a task's batch is that of all ranks
    if not len(task.val_set):
        raise TrainerError(f"--data {s.data}: there is no picture in its split val", "add the pictures to be scored")
    content = checkpoint.load(s.weights)
    if list(content["names"]) != list(task.names):
        odd = [name for name in task.names if name not in content["names"]] or list(task.names)
        raise TrainerError(
            f"--data {s.data}: its classes are not those of {s.weights}: {', '.join(odd[:5])}",
            "validate on the data that the weights were trained for",
        )
    model: Any = task.build(lambda _: None)
    fit = [k for k, v in model.state_dict().items() if k in content["ema"] and content["ema"][k].shape == v.shape]
    if len(fit) != len(model.state_dict()):
        raise TrainerError(
            f"--weights {s.weights}: not all tensors fit the model", "take a best.pt or last.pt, and its --imgsz"
        )
    model.to(device)
    workers = dist.default_workers(device, world) if s.workers is None else s.workers
    share = {"rank": world.rank, "world": world.size, "local_size": world.local_size}
    loader: Any = task.val_loader({**share, "workers": workers, "stride": task.stride})
    if device.type == "cuda":
        loader.pin()
    backend = dist.join(world, device)
    events.emit(contract.READY, rank=world.rank, world_size=world.size, backend=backend or "none", device=device.type)
    batches = track(iter(loader), len(loader), "validating") if world.rank == 0 else loader
    started = time.perf_counter()
    metric, shown = task.evaluate(model, batches, device, type_for(s.precision, False, device))
    per_picture = 1000 * (time.perf_counter() - started) * world.size / max(1, len(task.val_set))
    states = dist.gather(metric.state())
    result = None
    if states:
        whole: Any = task.metric()
        for state in states:
            whole.merge(state)
        scores, folder = whole.compute(), None
        if plots:
            from trainer.plots import DRAWINGS  # matplotlib loads slowly

            folder = checkpoint.make_run_dir(os.environ, s.project, s.name, s.exist_ok)
            DRAWINGS[task.kind].metric(whole, folder)
            DRAWINGS[task.kind].shown(shown, task.names, folder / "predictions.jpg")
        result = Scored(scores, task, s.imgsz, per_picture, folder)
        told = {key: scores.columns()[key] for key in task.headlines}
        events.emit(contract.DONE, seconds=time.monotonic() - begin, **told)
    dist.leave()
    return result


def settings_for(kind: str, weights: str, data: str, **options: Any) -> Settings:
    """The settings under which a checkpoint of a task is scored, at its own side of pictures where none is given."""
    preset = preset_for(data, kind)
    imgsz = options.pop("imgsz") or int(checkpoint.load(weights)["imgsz"])
    rest = {"cfg": "", "epochs": 1, "optimizer": "SGD", "seed": 0, "schedule": "linear", "val": True}
    values: dict[str, Any] = {"task": kind, "data": data, "weights": weights, "hyp": preset.hyp, "imgsz": imgsz, **rest}
    return Settings(**values, **options)
