"""Detection task: a detector of any family, and mean average precision."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.config import Hyp, ModelCfg, Settings, family_of, hyp_keys, named_families
from trainer.config.imports import is_import_path
from trainer.data.augment.device_painter import choose_painter
from trainer.data.dataset import Dataset, NoImages
from trainer.data.loading.detection_loader import TrainLoader, ValBatch, ValLoader
from trainer.data.registry import Split, open_datasets
from trainer.detectors import Detections, Limits, Sample, build, load_weights, read_cfg
from trainer.detectors.detector import Detector, to_original
from trainer.distributed.comm import LoaderShare
from trainer.errors import TrainerError
from trainer.losses.criterion import Criterion
from trainer.metrics import BoxMAP, BoxScores
from trainer.tasks import Evaluation, Task
from trainer.weights import checkpoint_file

DEFAULT_CFG = "yolov5n.yaml"
SHOWN = 12  # validation images in the plot of predictions
SHOWN_CONFIDENCE = 0.25  # the plot has no boxes below this score; mAP uses all


class Detection(Task):
    """Training of a detector on boxes."""

    kind = "detect"
    headlines: Mapping[str, str] = {"map50": "mAP50", "map": "mAP50-95"}
    columns = BoxScores.COLUMNS

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        s = settings
        known = hyp_keys(self.kind)
        for key, usual in dataclasses.asdict(Hyp()).items():
            if key not in known and getattr(s.hyp, key) != usual:
                raise TrainerError(
                    f"--hyp: {key} has no effect on boxes", "leave it out, or use --task classify"
                )
        self._resumed = checkpoint_file.resumed(s.resume) if s.weights or s.cfg else None
        self._weights = load_weights(s.weights) if s.weights and not self._resumed else None
        if self._weights:
            checkpoint_file.check_task(self._weights, "detect", s.weights)
            self._check_family(self._weights["cfg"])
        self._where = s.cfg or s.weights or DEFAULT_CFG
        self.cfg = self._read_cfg()
        how: dict[str, Any] = {
            "imgsz": s.imgsz,
            "single_cls": s.single_cls,
            "allow_bad_labels": s.allow_bad_labels,
        }
        splits: list[Split] = ["train"] if s.noval else ["train", "val"]
        self.train_set, *others = open_datasets(s.data, splits, **how)
        self.val_set = others[0] if others else NoImages(self.train_set.names)
        found = [fault for split in (self.train_set, self.val_set) for fault in getattr(split, "faults", ())]
        self.left_out = list(dict.fromkeys(found))  # both splits have the warnings of their common folders
        self.names = self.train_set.names

    def _check_family(self, cfg: Mapping[str, Any]) -> None:
        """Raise TrainerError if --cfg does not name the family of the weights: its preset needs it."""
        s = self._settings
        family = next((name for name in named_families() if name in cfg), "")
        if not family or family_of(s.cfg)[0] == family:
            return
        model = cfg[family] if isinstance(cfg[family], str) else "..."
        mark = ":" if family == "torchvision" else "-"
        given = f"--cfg is {s.cfg}" if s.cfg else "--cfg is not given"
        raise TrainerError(
            f"--weights {s.weights}: these are weights of {family}, but {given}",
            f"add --cfg {family}{mark}{model}, which has the defaults for training it",
        )

    def _read_cfg(self) -> ModelCfg:
        """Return the model of --cfg, else of the weights; of a resumed run whose --cfg is gone, its checkpoint's."""
        cfg = self._settings.cfg
        made = self._weights or self._resumed
        if made and not cfg:
            return dict(made["cfg"])
        try:
            return read_cfg(self._where)
        except TrainerError:
            is_gone = not Path(cfg).exists() and not is_import_path(cfg)
            if not (self._resumed and is_gone):
                raise
            return dict(self._resumed["cfg"])

    def build(self, say: Callable[[str], None]) -> nn.Module:
        """Return the network for the classes of the data, with the matching tensors of --weights."""
        s = self._settings
        self._parts = build(self.cfg, nc=len(self.names), where=self._where, hyp=s.hyp, imgsz=s.imgsz)
        self._parts.check(s, self._where)
        model = self._parts.model
        self.terms = self._parts.criterion.terms
        self.stride = self._parts.stride
        self.norm_stride = self._parts.norm_stride
        self.least_side = self._parts.least_side
        self.can_compile = self._parts.can_compile
        self.backbone = self._parts.backbone
        if self._weights:
            say(self._transfer(model, self._weights))
        return model

    def _transfer(self, model: nn.Module, weights: Mapping[str, Any]) -> str:
        """Copy the matching tensors of --weights into the model, and return a message for the user."""
        s = self._settings
        state: Mapping[str, Tensor] = weights["ema"]
        kept = other_anchors(model, state) if s.cfg else []
        taken = {name: tensor for name, tensor in state.items() if name not in kept}
        fit, of = checkpoint_file.transfer(model, taken, s.weights)
        message = f"weights from {s.weights}: {fit}/{of} tensors"
        if kept:
            message += f"; the anchors are taken from {self._where}"
        before = len(weights["names"])
        now = len(self.names)
        if before != now:
            message += f"; a new head for {now} classes instead of {before}"
        return message

    def fit(self, model: Any) -> str:
        """Fit the model to the boxes of the data, if its family does that."""
        s = self._settings
        if not self._parts.fit:
            return ""
        self.cfg, message = self._parts.fit(
            model, self.cfg, self.train_set, imgsz=s.imgsz, anchor_t=s.hyp.anchor_t, seed=s.seed
        )
        return message

    def criterion(self) -> Criterion:
        """Return the loss of the detector."""
        return self._parts.criterion

    def prepare_targets(self, loader: TrainLoader, val_loader: ValLoader, model: Any, *, pads: bool) -> None:
        """Let the workers make the targets of the detector's loss."""
        criterion = self._parts.criterion
        assign = criterion.assigner(model)
        loader.assign_with(assign, pads=pads)
        if criterion.validates:
            val_loader.assign_with(assign)

    def train_loader(self, share: LoaderShare, device: torch.device) -> TrainLoader:
        """Return the loader of augmented batches."""
        s = self._settings
        close_mosaic = self._parts.close_mosaic if s.hyp.close_mosaic is None else s.hyp.close_mosaic
        keys = ("imgsz", "batch", "seed", "hyp", "epochs", "multi_scale", "rect", "image_weights")
        options: dict[str, Any] = {key: getattr(s, key) for key in keys}
        painter, note = choose_painter(s.augment_on, device)
        loader = TrainLoader(self.train_set, close_mosaic=close_mosaic, painter=painter, **options, **share)
        loader.notes += [note] if note else []
        return loader

    def val_loader(self, share: LoaderShare) -> ValLoader:
        """Return the loader of letterboxed batches."""
        s = self._settings
        rect = not self._parts.needs_squares
        return ValLoader(self.val_set, imgsz=s.imgsz, batch=s.batch, rect=rect, **share)

    def metric(self) -> BoxMAP:
        """Return an empty metric."""
        return BoxMAP(self.names)

    def evaluate(
        self,
        model: nn.Module,
        batches: Iterable[ValBatch],
        device: torch.device,
        dtype: torch.dtype,
        criterion: Criterion | None = None,
    ) -> Evaluation:
        """Evaluate on this rank's batches; the images to show are its first ones."""
        metric = self.metric()
        shown = list[Sample]()
        detector = Detector(model, self._parts, device, dtype, Limits())
        for image_id, found in detect(detector, batches):
            count(metric, self.val_set, image_id, found)
            if len(shown) < SHOWN:
                shown.append(sample_of(self.val_set, image_id, found))
        return Evaluation(metric, shown, detector.losses)


def other_anchors(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of anchor tensors that differ in `state` but have the same shape."""
    own = {k: v for k, v in model.state_dict().items() if k.endswith(".anchors") and k in state}
    return [
        k
        for k, v in own.items()
        if v.shape == state[k].shape and not torch.allclose(v, state[k].to(v), rtol=1e-3)
    ]


def detect(detector: Detector, batches: Iterable[ValBatch]) -> Iterator[tuple[int, Detections]]:
    """Yield each image's number with its detections, in pixels of the original image."""
    for batch in batches:
        pads = batch.pads.tolist()
        detections = detector(batch.images, batch.targets)
        for i, (image_id, found) in enumerate(zip(batch.ids.tolist(), detections, strict=True)):
            height, width = batch.shapes[i]
            boxes = to_original(found.boxes, pads[i], height, width)
            yield image_id, dataclasses.replace(found, boxes=boxes)


def count(metric: BoxMAP, dataset: Dataset, image_id: int, found: Detections) -> None:
    """Add the detections and the ground truth of an image to the metric."""
    true_boxes, true_classes = truth_of(dataset, image_id)
    metric.update(image_id, found.boxes, found.scores, found.classes, true_boxes, true_classes)


def truth_of(dataset: Dataset, image_id: int) -> tuple[Any, Any]:
    """Return an image's labels: boxes (n, 4) xyxy in px of the original image, and classes (n,)."""
    labels, (height, width) = dataset.labels(image_id), dataset.size(image_id)
    centre = labels[:, 1:3]
    half = labels[:, 3:] / 2
    boxes = np.concatenate((centre - half, centre + half), 1) * np.array([width, height, width, height])
    return boxes, labels[:, 0]


def sample_of(
    dataset: Dataset, image_id: int, found: Detections, truth: tuple[Any, Any] | None = None
) -> Sample:
    """Return an image with its labels, or those in `truth` (boxes, classes), and its detections that are sure."""
    sure = found.scores >= SHOWN_CONFIDENCE
    boxes, scores, classes = (part[sure].numpy() for part in (found.boxes, found.scores, found.classes))
    true_boxes, true_classes = truth or truth_of(dataset, image_id)
    return Sample(dataset.image(image_id), true_boxes, true_classes, boxes, scores, classes)
