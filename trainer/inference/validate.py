"""Evaluation of a detector on a dataset, on one or more ranks."""

import dataclasses
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import contract
from trainer.config.faults import note_left_out
from trainer.config.inference import ValSettings
from trainer.data.dataset import Dataset
from trainer.data.loading.detection_loader import ValLoader
from trainer.data.progress import track
from trainer.data.registry import open_dataset
from trainer.detectors import Detections, Limits, Sample
from trainer.detectors.detector import Detector
from trainer.distributed import comm
from trainer.engine.events import Events
from trainer.engine.timing import StepTimer
from trainer.inference.formats import CocoTruth, coco_results, image_ids, unique_stems, write_labels
from trainer.inference.score import check_names
from trainer.inference.trained import load_trained, type_for
from trainer.metrics import BoxMAP, BoxScores
from trainer.tasks.detection import SHOWN, count, detect, sample_of
from trainer.weights import checkpoint_file


@dataclass(frozen=True)
class Validation:
    """Result of an evaluation, with times per image; `folder` is None if nothing was written."""

    scores: BoxScores
    load_ms: float
    network_ms: float
    nms_ms: float
    imgsz: int
    folder: Path | None

    def as_json(self) -> str:
        """Return the result as one line of JSON."""
        scores = dataclasses.asdict(self.scores)
        scores["per_class"] = {name: score._asdict() for name, score in self.scores.per_class.items()}
        times = {"load": self.load_ms, "network": self.network_ms, "nms": self.nms_ms}
        content = {**scores, "ms_per_image": times, "imgsz": self.imgsz}
        return json.dumps({**_finite(content), "folder": str(self.folder) if self.folder else None})

    def text(self) -> str:
        """Return the table of the scores, then the scores by box size and the times per image."""
        scores = self.scores
        lines = [scores.table(), f"P, R and F1 at confidence {scores.confidence:.2f}, the highest mean F1"]
        sizes = [f"{name} {value:.3f}" for name, value in (scores.by_area or {}).items() if value == value]
        if len(sizes) > 1:
            lines.append(f"mAP50-95 by box size: {', '.join(sizes)}")
        network = f"network {self.network_ms:.1f} ms, NMS {self.nms_ms:.1f} ms"
        lines.append(f"per image at {self.imgsz} px: load {self.load_ms:.1f} ms, {network}")
        return "\n".join(lines)


def validate(settings: ValSettings) -> Validation | None:
    """Run an evaluation; return the result on rank 0, else None."""
    s = settings
    begin = time.monotonic()
    events = Events(os.environ)
    world = comm.world_of(os.environ)
    device = comm.pick_device(s.device, world)
    comm.limit_threads(world, device)
    trained = load_trained(s.weights, s.cfg)
    imgsz = trained.imgsz if s.imgsz is None else s.imgsz
    dtype = type_for(s.precision, s.half, device)
    options: dict[str, Any] = {"single_cls": s.single_cls, "allow_bad_labels": s.allow_bad_labels}
    dataset = open_dataset(s.data, s.split, imgsz=imgsz, **options)  # type: ignore[arg-type]
    check_names(s.data, dataset.names, s.weights, trained.names)
    truth = CocoTruth(s.annotations, trained.names) if s.annotations else None
    if truth:
        truth.check_images([dataset.name(k) for k in range(len(dataset))])
    share = comm.share_of(world, device, s.workers, trained.stride)
    rect = s.rect and not trained.parts.needs_squares
    loader = ValLoader(dataset, imgsz=imgsz, batch=s.batch, rect=rect, **share)
    left_out = note_left_out(s.data, getattr(dataset, "faults", ()))
    for note in (*left_out, *loader.notes) if world.rank == 0 else ():
        print(note, file=sys.stderr)  # stdout may be JSON
    # Before the rendezvous, so that only rank 0 reports an error of the folder.
    writes = world.rank == 0 and (s.plots or s.save_json or s.save_txt)
    folder = checkpoint_file.make_run_dir(os.environ, s.project, s.name, s.exist_ok) if writes else None
    backend = comm.join(world, device)
    events.emit(
        contract.READY, rank=world.rank, world_size=world.size, backend=backend or "none", device=device.type
    )
    detector = Detector(trained.model, trained.parts, device, dtype, Limits(s.conf, s.iou, s.max_det))
    own = _RankResult(s, trained.names, truth)
    timer = StepTimer(device)
    batches = timer.waiting(iter(loader))
    if world.rank == 0:
        batches = track(batches, len(loader), "validating")
    for index, found in detect(detector, batches):
        own.add(dataset, index, found)
    seconds = (timer.spent["data"], detector.network_s, detector.nms_s)
    parts = comm.gather((own, [1000 * part / max(1, detector.images) for part in seconds]))
    result = None
    if parts:
        whole = _RankResult(s, trained.names, truth)
        for part, _ in parts:
            whole.merge(part)
        scores = whole.metric.compute()
        # Ranks without images have no times.
        busy = [ms for part, ms in parts if part.metric.images]
        load, network, nms = (sum(column) / len(busy) for column in zip(*busy, strict=True))
        if folder:
            whole.write(folder, dataset)
        result = Validation(scores, load, network, nms, imgsz, folder)
        events.emit(contract.DONE, seconds=time.monotonic() - begin, map50=scores.map50, map=scores.map)
    comm.leave()
    return result


class _RankResult:
    """Detections and metric of one rank."""

    def __init__(self, settings: ValSettings, names: list[str], truth: CocoTruth | None) -> None:
        self.metric = BoxMAP(names, by_area=True, yolov5=settings.v5_map)
        self._settings = settings
        self._names = names
        self._truth = truth
        self._shown: dict[int, Sample] = {}
        self._found: dict[int, tuple[Any, Any, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_truth": None}  # all ranks have read it

    def add(self, dataset: Dataset, index: int, found: Detections) -> None:
        s = self._settings
        shown = None
        if self._truth:
            truth = self._truth.of(dataset.name(index))
            shown = truth[:2]
            self.metric.update(index, found.boxes, found.scores, found.classes, *truth)
        else:
            count(self.metric, dataset, index, found)
        if s.plots and len(self._shown) < SHOWN:
            self._shown[index] = sample_of(dataset, index, found, shown)
        if s.save_json or s.save_txt:
            self._found[index] = (found.boxes.numpy(), found.scores.numpy(), found.classes.numpy())

    def merge(self, other: "_RankResult") -> None:
        self.metric.merge(other.metric)
        self._shown |= other._shown
        self._found |= other._found

    def write(self, folder: Path, dataset: Dataset) -> None:
        """Write the files that the settings name."""
        s = self._settings
        if s.plots:
            from trainer.plots import detect as plots  # matplotlib loads slowly

            plots.metric(self.metric, folder)
            shown = [self._shown[k] for k in sorted(self._shown)[:SHOWN]]
            plots.shown(shown, self._names, folder / "predictions.jpg")
        if s.save_json:
            truth = self._truth
            names = [dataset.name(k) for k in sorted(self._found)]
            ids = list(map(truth.id_of, names)) if truth else image_ids(names)
            categories = truth.categories if truth else range(len(self._names))
            found = [(number, *self._found[k]) for number, k in zip(ids, sorted(self._found), strict=True)]
            results = json.dumps(coco_results(found, categories))
            checkpoint_file.write_bytes(folder / "predictions.json", results.encode())
        if s.save_txt:
            numbers = sorted(self._found)
            for k, stem in zip(numbers, unique_stems([dataset.name(k) for k in numbers]), strict=True):
                write_labels(folder / f"labels/{stem}.txt", *self._found[k], dataset.size(k), s.save_conf)


def _finite(value: Any) -> Any:
    """Replace NaN by None, since JSON has no NaN."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
