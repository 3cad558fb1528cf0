"""Scores of a trained model on a data set, from however many ranks share the work."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import contract, dist
from trainer.config import check_data_path
from trainer.data import Dataset, ValLoader, open_dataset
from trainer.errors import TrainerError
from trainer.events import Events
from trainer.inference.formats import category_ids, coco_results, image_id, label_rows, unique_stems, write_text
from trainer.inference.truth import CocoTruth
from trainer.metrics import BoxMAP, BoxScores
from trainer.progress import Waits, track
from trainer.tasks.detection import SHOWN, Shown, count, detect, sure_of
from trainer.tasks.inference import Detections, Detector, Limits, Trained, load_trained, type_for
from trainer.weights import checkpoint

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class ValSettings:
    """What a validation was told."""

    weights: str
    data: str
    split: str = "val"
    imgsz: int | None = None  # None: the side that the weights were trained at
    batch: int = 32
    device: str = ""
    limits: Limits = Limits()  # noqa: RUF009 (frozen)
    precision: str = "auto"
    half: bool = False
    workers: int | None = None
    rect: bool = True
    single_cls: bool = False
    allow_bad_labels: bool = False
    yolov5_map: bool = False
    annotations: str = ""  # COCO's JSON, whose boxes, areas and crowds then count instead of the data's labels
    save_json: bool = False
    save_txt: bool = False
    save_conf: bool = False
    plots: bool = True
    project: str = "runs"
    name: str = "val"
    exist_ok: bool = False
    cfg: str = ""  # of a user's own model

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise TrainerError(f"--split {self.split}: unknown", f"use one of {', '.join(SPLITS)}")
        if self.batch < 1:
            raise TrainerError(f"--batch is {self.batch}, it must be 1 or more")
        if self.workers is not None and self.workers < 0:
            raise TrainerError(f"--workers is {self.workers}, it must be 0 or more")
        if self.save_conf and not self.save_txt:
            raise TrainerError("--save-conf: no labels are written for it to stand in", "add --save-txt")


@dataclass(frozen=True)
class Validation:
    """What came out: scores, milliseconds per picture, and the folder if anything was written."""

    scores: BoxScores
    load_ms: float
    network_ms: float
    nms_ms: float
    imgsz: int
    folder: Path | None


def check_names(names: list[str], trained: Trained, settings: ValSettings) -> None:
    """An error for a data set whose classes are not those of the weights, naming the first that differs."""
    where, hint = f"--data {settings.data}", "validate on the data that the weights were trained for"
    if len(names) != len(trained.names):
        raise TrainerError(f"{where}: {len(names)} classes, but {settings.weights} knows {len(trained.names)}", hint)
    for k, (data, weights) in enumerate(zip(names, trained.names, strict=True)):
        if data != weights:
            raise TrainerError(f"{where}: class {k} is `{data}`, but in {settings.weights} it is `{weights}`", hint)


def validate(settings: ValSettings) -> Validation | None:
    """Validate as told; the result on rank 0, None on the others."""
    s = settings
    begin = time.monotonic()
    events = Events(os.environ)
    world = dist.world_of(os.environ)
    device = dist.pick_device(s.device, world)
    dist.limit_threads(world)
    check_data_path(s.data)
    trained = load_trained(s.weights, s.cfg)
    imgsz = s.imgsz or trained.imgsz
    trained.check_imgsz(imgsz)
    dtype = type_for(s.precision, s.half, device)
    how: dict[str, Any] = {"single_cls": s.single_cls, "allow_bad_labels": s.allow_bad_labels}
    dataset = open_dataset(s.data, s.split, imgsz=imgsz, **how)  # type: ignore[arg-type]
    check_names(dataset.names, trained, s)
    truth = CocoTruth(s.annotations, trained.names) if s.annotations else None
    workers = dist.default_workers(device, world) if s.workers is None else s.workers
    share: dict[str, Any] = {"rank": world.rank, "world": world.size, "local_size": world.local_size}
    share |= {"workers": workers, "stride": trained.stride}
    loader = ValLoader(dataset, imgsz=imgsz, batch=s.batch, rect=s.rect, **share)
    if device.type == "cuda":
        loader.pin()
    for note in loader.notes if world.rank == 0 else ():
        print(note, file=sys.stderr)  # stdout may be JSON

    backend = dist.join(world, device)
    events.emit(contract.READY, rank=world.rank, world_size=world.size, backend=backend or "none", device=device.type)
    folder = _agreed_folder(s, world) if s.plots or s.save_json or s.save_txt else None
    detector = Detector(trained.model, device, dtype, s.limits)
    own = _Share(s, trained.names, truth)
    waits = Waits()
    batches = waits.timing(loader)
    if world.rank == 0:
        batches = track(batches, len(loader), "validating")
    for index, found in detect(detector, batches):
        own.add(dataset, index, found)
    seconds = (waits.seconds, detector.network_s, detector.nms_s)
    parts = dist.gather((own, [1000 * part / max(1, detector.pictures) for part in seconds]))
    result = None
    if parts:
        whole = _Share(s, trained.names, truth)
        for part, _ in parts:
            whole.merge(part)
        scores = whole.metric.compute()
        # The mean over the ranks that had something to do.
        busy = [ms for part, ms in parts if part.metric.pictures]
        load, network, nms = (sum(column) / len(busy) for column in zip(*busy, strict=True))
        if folder:
            whole.write(folder, dataset)
        result = Validation(scores, load, network, nms, imgsz, folder)
        events.emit(contract.DONE, seconds=time.monotonic() - begin, map50=scores.map50, map=scores.map)
    dist.leave()
    return result


class _Share:
    """What one rank found, and what is to be made of it."""

    def __init__(self, settings: ValSettings, names: list[str], truth: CocoTruth | None) -> None:
        self.metric = BoxMAP(names, by_area=True, yolov5=settings.yolov5_map)
        self._settings, self._names, self._truth = settings, names, truth
        self._shown: dict[int, Shown] = {}
        self._found: dict[int, tuple[Any, Any, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_truth": None}  # every rank has it already

    def add(self, dataset: Dataset, index: int, found: Detections) -> None:
        s = self._settings
        if self._truth:
            truth = self._truth.of(dataset.name(index))
            self.metric.update(index, found.boxes, found.scores, found.classes, *truth)
        else:
            count(self.metric, dataset, index, found)
        if s.plots and len(self._shown) < SHOWN:
            self._shown[index] = sure_of(dataset, index, found)
        if s.save_json or s.save_txt:
            self._found[index] = (found.boxes.numpy(), found.scores.numpy(), found.classes.numpy())

    def merge(self, other: _Share) -> None:
        self.metric.merge(other.metric.state())
        self._shown |= other._shown
        self._found |= other._found

    def write(self, folder: Path, dataset: Dataset) -> None:
        """Everything that was asked for, into the folder."""
        s = self._settings
        if s.plots:
            from trainer.plots import draw_metric, draw_predictions  # matplotlib loads slowly

            draw_metric(self.metric, folder)
            draw_predictions(
                [self._shown[k] for k in sorted(self._shown)[:SHOWN]], self._names, folder / "predictions.jpg"
            )
        if s.save_json:
            truth = self._truth
            id_of, categories = (truth.id_of, truth.categories) if truth else (image_id, category_ids(self._names))
            found = [(id_of(dataset.name(k)), *self._found[k]) for k in sorted(self._found)]
            write_text(folder / "predictions.json", json.dumps(coco_results(found, categories)))
        if s.save_txt:
            (folder / "labels").mkdir(exist_ok=True)
            numbers = sorted(self._found)
            for k, stem in zip(numbers, unique_stems([dataset.name(k) for k in numbers]), strict=True):
                boxes, scores, classes = self._found[k]
                text = label_rows(boxes, scores, classes, dataset.size(k), s.save_conf)
                write_text(folder / "labels" / f"{stem}.txt", text)


def as_json(result: Validation) -> str:
    """The result for scripts, in one line."""
    scores = dataclasses.asdict(result.scores)
    scores["per_class"] = {name: score._asdict() for name, score in result.scores.per_class.items()}
    times = {"load": result.load_ms, "network": result.network_ms, "nms": result.nms_ms}
    content = {**scores, "ms_per_picture": times, "imgsz": result.imgsz}
    return json.dumps({**_finite(content), "folder": str(result.folder) if result.folder else None})


def _finite(value: Any) -> Any:
    """NaN as null: JSON has no word for it."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _agreed_folder(settings: ValSettings, world: dist.World) -> Path:
    """The folder, made by rank 0; where it cannot, all ranks stop."""
    folder, error = None, None
    if world.rank == 0:
        try:
            folder = checkpoint.make_run_dir(os.environ, settings.project, settings.name, settings.exist_ok)
        except TrainerError as found:
            error = found
    dist.agree(error)
    return dist.broadcast(folder)  # type: ignore[no-any-return]
