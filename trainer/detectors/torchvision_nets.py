"""torchvision's RetinaNet (Lin et al. 2017) and FCOS (Tian et al. 2019), from random weights: --cfg torchvision:..."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.image_list import ImageList
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from trainer.config import Hyp
from trainer.detectors import Detections, Limits, Parts
from trainer.errors import TrainerError
from trainer.losses import Criterion, Rows, Targets, exact
from trainer.models.torchvision_nets import Classifier

SMALL = "retinanet_resnet18_fpn"  # of torchvision's parts, for a CPU
FCOS = "fcos_resnet50_fpn"
MODELS = ("retinanet_resnet50_fpn", "retinanet_resnet50_fpn_v2", SMALL, FCOS)


def build(cfg: dict[str, Any], *, nc: int, where: str, hyp: Hyp, imgsz: int) -> Parts:
    """Build {"torchvision": one of MODELS} for `nc` classes."""
    name = cfg["torchvision"]
    if name not in MODELS:
        known = ", ".join(f"torchvision:{each}" for each in MODELS)
        raise TrainerError(f"{where}: torchvision has no detector {name!r} that can be trained here", f"use {known}")
    if name == SMALL:
        how = {"weights": None, "trainable_layers": 5, "returned_layers": [2, 3, 4], "norm_layer": nn.BatchNorm2d}
        net = detection.RetinaNet(
            resnet_fpn_backbone(backbone_name="resnet18", extra_blocks=LastLevelP6P7(256, 256), **how), nc
        )
    else:
        head = {"head": CountingHead(256, 1, nc)} if name == FCOS else {}
        net = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=nc, **head)
    loss = FcosLoss(net) if name == FCOS else RetinaNetLoss(net)
    return Parts(Network(net), loss, postprocess, can_compile=False, unsupported={"parallel": ("pipeline",)})


class Network(Classifier):
    """torchvision's detector without its resizing, behind the normalisation of its images."""

    def forward(self, images: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """Return cls_logits (b, n, nc), bbox_regression (b, n, 4), anchors (n, 4) xyxy in px, cells of each level (l,).

        FCOS has bbox_ctrness (b, n, 1) too.
        """
        net: Any = self.net
        images = (images - self.mean) / self.std
        features, size = list(net.backbone(images).values()), (images.shape[2], images.shape[3])
        anchors = net.anchor_generator(ImageList(images, [size]), features)[0]
        cells = torch.tensor([each.shape[2] * each.shape[3] for each in features], device=images.device)
        return {**net.head(features), "anchors": anchors, "cells": cells}


class RetinaNetLoss(Criterion):
    """torchvision's loss: the mean over the images of focal loss and box loss, each per matched anchor of an image."""

    terms: tuple[str, ...] = ("cls", "box")

    def __init__(self, net: Any) -> None:
        super().__init__([1.0] * len(self.terms))
        self._compute = net.compute_loss  # its matcher and its coder have no weights

    def assigner(self, model: Any, /) -> Any:
        """Return `boxes_of`."""
        return boxes_of

    def forward(self, outputs: dict[str, Tensor], targets: Targets, /) -> tuple[Tensor, Tensor]:
        """Return the sums (2, 1) and the images (1,)."""
        images, boxes = len(outputs["cls_logits"]), targets["boxes"]
        found = self._compute(labels_of(boxes, images), heads_of(outputs), [outputs["anchors"]] * images)
        means = torch.stack((found["classification"], found["bbox_regression"]))
        return means[:, None] * images, torch.full((1,), images, dtype=torch.float64, device=boxes.device)


class CountingHead(FCOSHead):  # type: ignore[misc]
    """FCOS's head, whose losses come with the number of matched cells, which the library divides them by."""

    def compute_loss(self, targets: Any, head_outputs: Any, anchors: Any, matched_idxs: list[Tensor]) -> Any:
        """Return the library's losses, and the number of matched cells."""
        losses = super().compute_loss(targets, head_outputs, anchors, matched_idxs)
        return {**losses, "matched": torch.stack([(each >= 0).sum() for each in matched_idxs]).sum()}


class FcosLoss(RetinaNetLoss):
    """torchvision's loss of FCOS: focal loss, GIoU loss and centreness, each per matched cell of all images."""

    terms = ("cls", "box", "ctr")

    def forward(self, outputs: dict[str, Tensor], targets: Targets, /) -> tuple[Tensor, Tensor]:
        """Return the sums (3, 1) and the matched cells (1,)."""
        images, cells = len(outputs["cls_logits"]), outputs["cells"].tolist()
        labels = labels_of(targets["boxes"], images)
        found = self._compute(labels, heads_of(outputs), [outputs["anchors"]] * images, cells)
        means = torch.stack([found[name] for name in ("classification", "bbox_regression", "bbox_ctrness")])
        return (means * found["matched"].clamp(min=1))[:, None], found["matched"].double()[None]


def heads_of(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of the network's head in float32."""
    return {name: values.float() for name, values in outputs.items() if name not in ("anchors", "cells")}


def labels_of(boxes: Tensor, images: int) -> list[dict[str, Tensor]]:
    """Return the labels of each image as torchvision takes them, from rows (n, 6) of `boxes_of`."""
    mine = [boxes[boxes[:, 0] == k] for k in range(images)]
    return [{"boxes": each[:, 2:], "labels": each[:, 1].long()} for each in mine]


def boxes_of(
    labels: npt.NDArray[np.float32], images: int, height: int, width: int, rows: Rows = exact
) -> dict[str, Tensor]:
    """Return `boxes` float32 (n, 6), [image, class, x1, y1, x2, y2] in pixels; without rows that pad."""
    centre, half = labels[:, 2:4], labels[:, 4:] / 2
    corners = np.concatenate((centre - half, centre + half), 1) * np.array([width, height] * 2, np.float32)
    return {"boxes": torch.from_numpy(np.concatenate((labels[:, :2], corners), 1))}


def postprocess(model: Any, outputs: dict[str, Tensor], limits: Limits) -> list[Detections]:
    """Return the detections of each image, by torchvision's thresholds and suppression over all levels together."""
    net, images = model.net, len(outputs["cls_logits"])
    net.score_thresh, net.nms_thresh, net.detections_per_img = limits.confidence, limits.iou, limits.most
    heads = {name: [values] for name, values in heads_of(outputs).items()}
    if limits.classes is not None:
        heads["cls_logits"][0] = heads["cls_logits"][0].clone()
        others = [k for k in range(heads["cls_logits"][0].shape[2]) if k not in limits.classes]
        heads["cls_logits"][0][..., others] = -torch.inf
    no_border = [(torch.inf, torch.inf)] * images  # boxes are clipped to the original image later
    found = net.postprocess_detections(heads, [[outputs["anchors"]]] * images, no_border)
    return [Detections(each["boxes"].cpu(), each["scores"].cpu(), each["labels"].cpu()) for each in found]
