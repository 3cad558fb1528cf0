"""Inference of a detector: finds the boxes in images, with a copy of a model on its device."""

import copy
import time
from dataclasses import replace

import torch
from torch import Tensor, nn

from trainer.data.batch import Targets
from trainer.detectors import Detections, Limits, Parts
from trainer.distributed import comm
from trainer.losses.criterion import LossSums
from trainer.models.precision import as_input, size_of
from trainer.models.yolo import fuse


class Detector:
    """Inference model: a fused copy on its device, with its accumulated times."""

    def __init__(
        self, model: nn.Module, parts: Parts, device: torch.device, dtype: torch.dtype, limits: Limits
    ) -> None:
        """Infer with `model`: the model of `parts`, or its average."""
        self._postprocess = parts.postprocess
        self._criterion = parts.criterion
        self._net = fuse(copy.deepcopy(model)).eval().to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.device = device
        self.dtype = dtype
        self.limits = limits
        # Sums over all calls.
        self.network_s = 0.0
        self.nms_s = 0.0
        self.images = 0
        self.losses = LossSums()

    @torch.inference_mode()
    def __call__(self, images: Tensor, targets: Targets | None = None) -> list[Detections]:
        """uint8 (b, h, w, 3) RGB, sides multiples of the stride -> detections of each image in pixels, on the CPU.

        With the targets of the loss, its sums are added to `losses`.
        """
        begin = comm.now(self.device)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            inputs = as_input(images.to(self.device, non_blocking=True))
            raw = self._criterion.validation_outputs(self._net, inputs) if targets else self._net(inputs)
        middle = comm.now(self.device)
        detections = [in_full_precision(image) for image in self._postprocess(self._net, raw, self.limits)]
        self.network_s += middle - begin
        self.nms_s += time.perf_counter() - middle
        self.images += len(images)
        if targets:
            moved = {name: values.to(self.device, non_blocking=True) for name, values in targets.items()}
            self.losses.add(*self._criterion(raw, moved, size_of(inputs)))
        return detections


def in_full_precision(found: Detections) -> Detections:
    """Return the detections in float32 if they are in bf16 or fp16, which NumPy and the metric cannot take."""
    boxes = found.boxes.to(torch.promote_types(found.boxes.dtype, torch.float32))
    scores = found.scores.to(torch.promote_types(found.scores.dtype, torch.float32))
    return replace(found, boxes=boxes, scores=scores)


def to_original(boxes: Tensor, pad: list[float], height: int, width: int) -> Tensor:
    """Convert boxes (n, 4) of a letterboxed image to pixels of the original; `pad` is (scale, pad_x, pad_y)."""
    scale, pad_x, pad_y = pad
    moved = (boxes - boxes.new_tensor([pad_x, pad_y, pad_x, pad_y])) / scale
    return torch.minimum(moved.clamp(min=0), moved.new_tensor([width, height, width, height]))
