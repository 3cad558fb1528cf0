"""Detector: inference of the averaged model, and non-maximum suppression."""

import copy
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import batched_nms

from trainer.config import PRECISIONS
from trainer.distributed import comm
from trainer.errors import TrainerError
from trainer.models.precision import as_input, native_bf16, pick_dtype, set_tf32
from trainer.models.yolo import Yolo, build_yolo, check_cfg, fuse, load_cfg
from trainer.weights import checkpoint_file

# Boxes that go into a round of suppression, surest first, until enough are found: an untrained model has thousands,
# and all at once they would cost more time than the network.
ROUND = 512
MAX_CANDIDATES = 30000  # YOLOv5's own limit


@dataclass(frozen=True)
class Limits:
    """Limits of detections: minimum score, maximum IoU of two boxes of a class, maximum boxes per image."""

    confidence: float = 0.001
    iou: float = 0.6
    most: int = 300
    classes: tuple[int, ...] | None = None  # only these

    def __post_init__(self) -> None:
        for option, value in (("--conf", self.confidence), ("--iou", self.iou)):
            if not 0 <= value < 1:
                raise TrainerError(f"{option} is {value:g}, it must be 0 or more and below 1")
        if self.most < 1:
            raise TrainerError(f"--max-det is {self.most}, it must be 1 or more")


@dataclass(frozen=True)
class Detections:
    """Detections of one image by falling score: boxes (n, 4) xyxy in px, scores (n,), classes (n,)."""

    boxes: Tensor
    scores: Tensor
    classes: Tensor


class Detector:
    """Inference model: a fused copy on its device, with its accumulated times."""

    def __init__(self, model: Yolo, device: torch.device, dtype: torch.dtype, limits: Limits) -> None:
        self._net = fuse(copy.deepcopy(model)).eval().to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.device, self.dtype, self.limits = device, dtype, limits
        self.network_s = self.nms_s = 0.0  # sum over all calls
        self.images = 0

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> list[Detections]:
        """uint8 (b, h, w, 3) RGB, sides multiples of the stride -> detections of each image in pixels, on the CPU."""
        begin = comm.now(self.device)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            raw = self._net(as_input(images.to(self.device, non_blocking=True)))
        decoded = self._net.detect.decode(raw)
        middle = comm.now(self.device)
        found = select(decoded, self.limits)
        self.network_s += middle - begin
        self.nms_s += time.perf_counter() - middle
        self.images += len(images)
        return found


def select(decoded: Tensor, limits: Limits) -> list[Detections]:
    """Return the detections of each image, on the CPU, from decoded outputs (b, n, 5 + nc): confidence, NMS per class.

    A box may be found for several classes. Score = objectness * class probability.
    """
    image, row = (decoded[..., 4] > limits.confidence).nonzero(as_tuple=True)
    likely = decoded[image, row]
    scores = likely[:, 4:5] * likely[:, 5:]
    if limits.classes is not None:
        wanted = torch.zeros(scores.shape[1], dtype=scores.dtype, device=scores.device)
        wanted[list(limits.classes)] = 1
        scores = scores * wanted
    place, cls = (scores > limits.confidence).nonzero(as_tuple=True)
    score, owner = scores[place, cls], image[place]
    corners = torch.cat((likely[:, :2] - likely[:, 2:4] / 2, likely[:, :2] + likely[:, 2:4] / 2), 1)
    counts = torch.bincount(owner, minlength=len(decoded)).tolist()
    parts = (torch.split(t, counts) for t in (place, score, cls))
    return [_suppress(corners[p], s, c, limits) for p, s, c in zip(*parts, strict=True)]


def _suppress(boxes: Tensor, score: Tensor, cls: Tensor, limits: Limits) -> Detections:
    """Return one image's boxes (n, 4) without those that overlap a box of their class with a higher score.

    Whether a box stays depends only on surer ones that stay, so that a round needs those and its own boxes alone.
    """
    score, order = score.sort(descending=True, stable=True)
    boxes, cls = boxes[order], cls[order]
    keep = order[:0]
    candidates = min(len(order), MAX_CANDIDATES)
    for start in range(0, candidates, ROUND):
        more = torch.arange(start, min(start + ROUND, candidates), device=order.device)
        keep = torch.cat((keep, more))
        keep = keep[batched_nms(boxes[keep], score[keep], cls[keep], limits.iou)]
        if len(keep) >= limits.most:
            break
    keep = keep[: limits.most]
    return Detections(boxes[keep].cpu(), score[keep].cpu(), cls[keep].cpu())


def to_original(boxes: Tensor, pad: list[float], height: int, width: int) -> Tensor:
    """Convert boxes (n, 4) of a letterboxed image to pixels of the original; `pad` is (scale, pad_x, pad_y)."""
    scale, pad_x, pad_y = pad
    moved = (boxes - boxes.new_tensor([pad_x, pad_y, pad_x, pad_y])) / scale
    return torch.minimum(moved.clamp(min=0), moved.new_tensor([width, height, width, height]))


@dataclass(frozen=True)
class Trained:
    """A checkpoint's averaged model, its class names and the image side that it was trained at."""

    model: Yolo
    names: list[str]
    imgsz: int

    @property
    def stride(self) -> int:
        """The stride in pixels: image sides must be multiples of it."""
        return max(self.model.detect.strides)


def type_for(precision: str, half: bool, device: torch.device) -> torch.dtype:
    """Return the dtype of --precision, or of --half: fp16 on a GPU, bf16 on a CPU."""
    if precision not in PRECISIONS:
        raise TrainerError(f"--precision {precision}: unknown", f"use one of {', '.join(PRECISIONS)}")
    meant = ("fp16" if device.type == "cuda" else "bf16") if half else precision
    if precision not in ("auto", meant):
        what = f"--half and --precision {precision} contradict each other: --half is {meant} on {device.type}"
        raise TrainerError(what, "give one of them")
    if half:  # also where the device would be slow at it
        return torch.float16 if meant == "fp16" else torch.bfloat16
    if precision == "fp32":
        set_tf32(False)
    return pick_dtype(precision, device, native_bf16(device))


def load_trained(weights: str, cfg: str = "") -> Trained:
    """Return the model of a checkpoint, ours or YOLOv5's; every tensor must fit.

    `cfg` names what builds it, which a checkpoint of a user's own model (by import path) leaves to its user.
    """
    content = checkpoint_file.load(weights)
    hint = "predict and export are for boxes; trainer val takes all weights"
    checkpoint_file.check_task(content, "detect", weights, hint)
    names = list(content["names"])
    described = load_cfg(cfg) if cfg else check_cfg(content["cfg"], weights)
    model = build_yolo(described, nc=len(names), where=cfg or weights)
    fit, of = checkpoint_file.transfer(model, content["ema"], weights)
    if fit != of:
        what = f"--weights {weights}: {of - fit} of the model's {of} tensors are missing"
        raise TrainerError(what, "take a best.pt or last.pt")
    return Trained(model, names, int(content["imgsz"]))
