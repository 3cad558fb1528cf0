"""Evaluation of classifiers and segmentation models on one or more ranks (detectors: validate.py)."""

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import contract
from trainer.config import Settings
from trainer.data.progress import track
from trainer.distributed import comm
from trainer.engine.events import Events
from trainer.errors import TrainerError
from trainer.inference.trained import type_for
from trainer.tasks import Scores, Task, open_task
from trainer.weights import checkpoint_file


@dataclass(frozen=True)
class Scored:
    """Result of an evaluation; `folder` is None if nothing was written."""

    scores: Any
    task: Task
    imgsz: int
    ms_per_image: float
    folder: Path | None

    def as_json(self) -> str:
        """Return the result as one line of JSON."""
        scores: Scores = self.scores
        classes = dict(zip(self.task.names, scores.by_class(self.task.names), strict=True))
        named = {name: None if value != value else value for name, value in classes.items()}
        content = {
            **scores.columns(),
            "per_class": named,
            "imgsz": self.imgsz,
            "ms_per_image": self.ms_per_image,
        }
        return json.dumps({**content, "folder": str(self.folder) if self.folder else None})

    def text(self) -> str:
        """Return the table of the scores, then the headlines and the time per image."""
        found = self.scores.columns()
        titles = "   ".join(f"{title} {found[key]:.3f}" for key, title in self.task.headlines.items())
        return f"{self.scores.table()}\n{titles}   per image at {self.imgsz} px: {self.ms_per_image:.1f} ms"


def check_names(data: str, names: Sequence[str], weights: str, trained: Sequence[str]) -> None:
    """Raise TrainerError with the first class that differs between the dataset and the weights."""
    hint = "validate on the data that the weights were trained for"
    if len(names) != len(trained):
        raise TrainerError(f"--data {data}: {len(names)} classes, but {weights} has {len(trained)}", hint)
    for k, (own, other) in enumerate(zip(names, trained, strict=True)):
        if own != other:
            raise TrainerError(f"--data {data}: class {k} is `{own}`, but in {weights} it is `{other}`", hint)


def score(settings: Settings, *, plots: bool) -> Scored | None:
    """Score `settings.weights` on the validation images, with `plots` in a new folder; return None except on rank 0."""
    s = settings
    begin = time.monotonic()
    events = Events(os.environ)
    world = comm.world_of(os.environ)
    device = comm.pick_device(s.device, world)
    comm.limit_threads(world, device)
    # A task's batch counts the images of all ranks.
    task = open_task(dataclasses.replace(s, batch=s.batch * world.size))
    if not len(task.val_set):
        raise TrainerError(f"--data {s.data}: the split val has no images", "add images to it")
    content = checkpoint_file.load(s.weights)
    check_names(s.data, task.names, s.weights, content["names"])
    model: Any = task.build(lambda _: None)
    fit = [
        k for k, v in model.state_dict().items() if k in content["ema"] and content["ema"][k].shape == v.shape
    ]
    if len(fit) != len(model.state_dict()):
        raise TrainerError(
            f"--weights {s.weights}: not all tensors fit the model",
            "use a best.pt or last.pt, and its --imgsz",
        )
    model.to(device)
    loader: Any = task.val_loader(comm.share_of(world, device, s.workers, task.stride))
    backend = comm.join(world, device)
    events.emit(
        contract.READY, rank=world.rank, world_size=world.size, backend=backend or "none", device=device.type
    )
    batches = track(iter(loader), len(loader), "validating") if world.rank == 0 else loader
    started = time.perf_counter()
    metric, shown, _ = task.evaluate(model, batches, device, type_for(s.precision, False, device))
    per_image = 1000 * (time.perf_counter() - started) * world.size / max(1, len(task.val_set))
    parts = comm.gather(metric)
    result = None
    if parts:
        whole: Any = task.metric()
        for part in parts:
            whole.merge(part)
        scores = whole.compute()
        folder = None
        if plots:
            from trainer.plots import DRAWINGS  # matplotlib loads slowly

            folder = checkpoint_file.make_run_dir(os.environ, s.project, s.name, s.exist_ok)
            DRAWINGS[task.kind].metric(whole, folder)
            DRAWINGS[task.kind].shown(shown, task.names, folder / "predictions.jpg")
        result = Scored(scores, task, s.imgsz, per_image, folder)
        headlines = {key: scores.columns()[key] for key in task.headlines}
        events.emit(contract.DONE, seconds=time.monotonic() - begin, **headlines)
    comm.leave()
    return result
