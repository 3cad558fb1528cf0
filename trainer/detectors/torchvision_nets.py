"""torchvision's RetinaNet (Lin et al. 2017), from random weights: --cfg torchvision:retinanet_resnet50_fpn."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.image_list import ImageList
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from trainer.config import Hyp
from trainer.detectors import Detections, Limits, Parts
from trainer.errors import TrainerError
from trainer.losses import Criterion, Rows, Targets, exact
from trainer.models.torchvision_nets import Classifier

SMALL = "retinanet_resnet18_fpn"  # of torchvision's parts, for a CPU
MODELS = ("retinanet_resnet50_fpn", "retinanet_resnet50_fpn_v2", SMALL)


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
        net = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=nc)
    return Parts(
        Network(net), RetinaNetLoss(net), postprocess, can_compile=False, unsupported={"parallel": ("pipeline",)}
    )


class Network(Classifier):
    """torchvision's detector without its resizing, behind the normalisation of its images."""

    def forward(self, images: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """Return cls_logits (b, n, nc), bbox_regression (b, n, 4), and anchors (n, 4) xyxy in px."""
        net: Any = self.net
        images = (images - self.mean) / self.std
        features, size = list(net.backbone(images).values()), (images.shape[2], images.shape[3])
        return {**net.head(features), "anchors": net.anchor_generator(ImageList(images, [size]), features)[0]}


class RetinaNetLoss(Criterion):
    """torchvision's loss: the mean over the images of focal loss and box loss, each per matched anchor of an image."""

    terms = ("cls", "box")

    def __init__(self, net: Any) -> None:
        super().__init__((1.0, 1.0))
        self._compute = net.compute_loss  # its matcher and its coder have no weights

    def assigner(self, model: Any, /) -> Any:
        """Return `boxes_of`."""
        return boxes_of

    def forward(self, outputs: dict[str, Tensor], targets: Targets, /) -> tuple[Tensor, Tensor]:
        """Return the sums (2, 1) and the images (1,)."""
        images, boxes = len(outputs["cls_logits"]), targets["boxes"]
        mine = [boxes[boxes[:, 0] == k] for k in range(images)]
        labelled = [{"boxes": each[:, 2:], "labels": each[:, 1].long()} for each in mine]
        heads = {name: outputs[name].float() for name in ("cls_logits", "bbox_regression")}
        found = self._compute(labelled, heads, [outputs["anchors"]] * images)
        means = torch.stack((found["classification"], found["bbox_regression"]))
        return means[:, None] * images, torch.full((1,), images, dtype=torch.float64, device=boxes.device)


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
    heads = {name: [outputs[name].float()] for name in ("cls_logits", "bbox_regression")}
    if limits.classes is not None:
        heads["cls_logits"][0] = heads["cls_logits"][0].clone()
        others = [k for k in range(heads["cls_logits"][0].shape[2]) if k not in limits.classes]
        heads["cls_logits"][0][..., others] = -torch.inf
    no_border = [(torch.inf, torch.inf)] * images  # boxes are clipped to the original image later
    found = net.postprocess_detections(heads, [[outputs["anchors"]]] * images, no_border)
    return [Detections(each["boxes"].cpu(), each["scores"].cpu(), each["labels"].cpu()) for each in found]
