"""Scores of a trained model on a data set, from however many ranks share the work."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer import checkpoint, contract, dist
from trainer.config import check_data_path
from trainer.data import Dataset, ValLoader, open_dataset
from trainer.errors import TrainerError
from trainer.events import Events
from trainer.loop import default_workers, native_bf16, pick_dtype
from trainer.metrics import BoxMAP, BoxScores
from trainer.tasks.detection import SHOWN, Shown, count, detect, sure_of
from trainer.tasks.inference import Detections, Detector, Limits, Trained, load_trained

SPLITS = ("train", "val", "test")
# COCO numbers its 80 classes from 1 to 90, with gaps.
_COCO_GAPS = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)
_COCO_ENDS = ("person", "toothbrush")

Item = TypeVar("Item")


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
    save_json: bool = False
    save_txt: bool = False
    save_conf: bool = False
    plots: bool = True
    project: str = "runs"
    name: str = "val"
    exist_ok: bool = False

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise TrainerError(f"--split {self.split}: unknown", f"use one of {', '.join(SPLITS)}")
        if self.batch < 1:
            raise TrainerError(f"--batch is {self.batch}, it must be 1 or more")
        check_limits(self.limits)
        if self.workers is not None and self.workers < 0:
            raise TrainerError(f"--workers is {self.workers}, it must be 0 or more")


@dataclass(frozen=True)
class Validation:
    """What came out: scores, milliseconds per picture, and the folder if anything was written."""

    scores: BoxScores
    load_ms: float
    network_ms: float
    nms_ms: float
    imgsz: int
    folder: Path | None


def check_limits(limits: Limits) -> None:
    """An error for thresholds that no box, or every one, could pass."""
    for option, value in (("--conf", limits.confidence), ("--iou", limits.iou)):
        if not 0 <= value < 1 or math.isnan(value):
            raise TrainerError(f"{option} is {value:g}, it must be 0 or more and below 1")
    if limits.most < 1:
        raise TrainerError(f"--max-det is {limits.most}, it must be 1 or more")


def check_imgsz(imgsz: int, stride: int) -> None:
    """An error for a side that the model's coarsest grid does not divide."""
    if imgsz < stride or imgsz % stride:
        near = max(stride, round(imgsz / stride) * stride)
        raise TrainerError(f"--imgsz {imgsz} is not a multiple of {stride}, the model's stride", f"use --imgsz {near}")


def pick_precision(precision: str, half: bool, device: torch.device) -> torch.dtype:
    """The type that the network computes in; `half` is 16 bits of the kind that the device has."""
    if half:
        return torch.float16 if device.type == "cuda" else torch.bfloat16
    return pick_dtype(precision, device, native_bf16(device))


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
    trained = load_trained(s.weights)
    imgsz = s.imgsz or trained.imgsz
    check_imgsz(imgsz, trained.stride)
    dtype = pick_precision(s.precision, s.half, device)
    how: dict[str, Any] = {"single_cls": s.single_cls, "allow_bad_labels": s.allow_bad_labels}
    dataset = open_dataset(s.data, s.split, imgsz=imgsz, **how)  # type: ignore[arg-type]
    check_names(dataset.names, trained, s)
    workers = default_workers(device, world) if s.workers is None else s.workers
    share: dict[str, Any] = {"rank": world.rank, "world": world.size, "workers": workers, "stride": trained.stride}
    loader = ValLoader(dataset, imgsz=imgsz, batch=s.batch, rect=s.rect, **share)

    backend = dist.join(world, device)
    events.emit(contract.READY, rank=world.rank, world_size=world.size, backend=backend or "none", device=device.type)
    folder = _agreed_folder(s, world) if s.plots or s.save_json or s.save_txt else None
    detector = Detector(trained.model, device, dtype, s.limits)
    own = _Share(s, trained.names)
    waits = Waits()
    batches = waits.timing(loader)
    if world.rank == 0:
        batches = bar(batches, len(loader), "validating")
    for image_id, found in detect(detector, batches):
        own.add(dataset, image_id, found)
    seconds = (waits.seconds, detector.network_s, detector.nms_s)
    parts = dist.gather((own, [1000 * part / max(1, detector.pictures) for part in seconds]))
    result = None
    if parts:
        whole = _Share(s, trained.names)
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


class Waits:
    """Adds up the time that is spent waiting for batches."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timing(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items as they come."""
        begin = time.perf_counter()
        for item in items:
            self.seconds += time.perf_counter() - begin
            yield item
            begin = time.perf_counter()


def bar(items: Iterable[Item], total: int | None, what: str) -> Iterator[Item]:
    """The items, with a progress bar on a terminal; on stderr, so that stdout can be piped."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(items, what, total, transient=True, console=console, disable=not console.is_terminal)


class _Share:
    """What one rank found, and what is to be made of it."""

    def __init__(self, settings: ValSettings, names: list[str]) -> None:
        self.metric = BoxMAP(names, by_area=True, yolov5=settings.yolov5_map)
        self._settings, self._names = settings, names
        self._shown: dict[int, Shown] = {}
        self._found: dict[int, tuple[Any, Any, Any]] = {}

    def add(self, dataset: Dataset, image_id: int, found: Detections) -> None:
        s = self._settings
        count(self.metric, dataset, image_id, found)
        if s.plots and len(self._shown) < SHOWN:
            self._shown[image_id] = sure_of(dataset, image_id, found)
        if s.save_json or s.save_txt:
            self._found[image_id] = (found.boxes.numpy(), found.scores.numpy(), found.classes.numpy())

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
            _write(folder / "predictions.json", json.dumps(self._coco(dataset)))
        if s.save_txt:
            (folder / "labels").mkdir(exist_ok=True)
            for k, stem in zip(
                sorted(self._found), unique_stems([dataset.name(k) for k in sorted(self._found)]), strict=True
            ):
                boxes, scores, classes = self._found[k]
                _write(folder / "labels" / f"{stem}.txt", rows(boxes, scores, classes, dataset.size(k), s.save_conf))

    def _coco(self, dataset: Dataset) -> list[dict[str, Any]]:
        """COCO's format of results; a picture's id is its file's number, or its name where that is none."""
        numbers = list(range(len(self._names)))
        if len(numbers) == 80 and (self._names[0], self._names[-1]) == _COCO_ENDS:
            numbers = [k for k in range(1, 91) if k not in _COCO_GAPS]
        results = []
        for k in sorted(self._found):
            stem = Path(dataset.name(k)).stem
            boxes, scores, classes = self._found[k]
            for (x1, y1, x2, y2), score, c in zip(boxes.tolist(), scores.tolist(), classes.tolist(), strict=True):
                results.append(
                    {
                        "image_id": int(stem) if stem.isdecimal() else stem,
                        "category_id": numbers[c],
                        "bbox": [round(v, 3) for v in (x1, y1, x2 - x1, y2 - y1)],
                        "score": round(score, 6),
                    }
                )
        return results


def rows(boxes: Any, scores: Any, classes: Any, size: tuple[int, int], with_score: bool) -> str:
    """Lines `class cx cy w h [score]` as fractions of the picture's `size` (height, width): YOLO's label format."""
    height, width = size
    lines = []
    for (x1, y1, x2, y2), score, c in zip(boxes.tolist(), scores.tolist(), classes.tolist(), strict=True):
        values = [(x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height]
        values += [score] if with_score else []
        lines.append(" ".join([str(c), *(f"{v:.6g}" for v in values)]) + "\n")
    return "".join(lines)


def unique_stems(names: list[str]) -> list[str]:
    """File names without folder and suffix; of equal ones the later get _2, _3, ..."""
    taken: dict[str, int] = {}
    stems = []
    for name in names:
        stem = Path(name).stem
        while stem in taken:
            taken[stem] += 1
            stem = f"{Path(name).stem}_{taken[Path(name).stem]}"
        taken[stem] = 1
        stems.append(stem)
    return stems


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


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
