"""torchvision's detectors, from random weights: --cfg torchvision:MODEL.

They are RetinaNet (Lin et al. 2017), FCOS (Tian et al. 2019), SSDlite (Sandler et al. 2018) and Faster R-CNN (Ren et
al. 2015).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import fastrcnn_loss
from torchvision.models.detection.rpn import concat_box_prediction_layers
from torchvision.ops import box_iou
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from trainer.config import Hyp, ModelCfg
from trainer.data.batch import Assign, BoxLabels, Rows, Targets, exact
from trainer.detectors import Detections, Limits, Parts, Postprocess
from trainer.errors import TrainerError
from trainer.losses.criterion import Criterion, ImageSize, Outputs
from trainer.models.torchvision_nets import Classifier

NO_BORDER = (torch.inf, torch.inf)  # boxes are clipped to the original image later
Labels = list[dict[str, Tensor]]  # of each image: boxes (n, 4) xyxy in px, labels int64 (n,)

SMALL = "retinanet_resnet18_fpn"  # of torchvision's parts, for a CPU
RCNNS = ("resnet50_fpn", "resnet50_fpn_v2", "mobilenet_v3_large_fpn", "mobilenet_v3_large_320_fpn")
SSDLITE_STRIDE = 512  # of its coarsest level


def build(cfg: ModelCfg, *, nc: int, where: str, hyp: Hyp, imgsz: int) -> Parts:
    """Build {"torchvision": one of MODELS} for `nc` classes."""
    name = cfg["torchvision"]
    if name not in MODELS:
        known = ", ".join(f"torchvision:{model}" for model in MODELS)
        what = f"{where}: torchvision has no detector {name!r} that can be trained here"
        raise TrainerError(what, f"use {known}")
    return MODELS[name](name, nc)


def _retinanet(name: str, nc: int) -> Parts:
    if name == SMALL:
        backbone = resnet_fpn_backbone(
            backbone_name="resnet18",
            weights=None,
            trainable_layers=5,
            returned_layers=[2, 3, 4],
            extra_blocks=LastLevelP6P7(256, 256),
            norm_layer=nn.BatchNorm2d,
        )
        net = detection.RetinaNet(backbone, nc)
    else:
        net = _untrained(name, nc)
    return _parts(Network(net), RetinaNetLoss(net), postprocess)


def _fcos(name: str, nc: int) -> Parts:
    net = _untrained(name, nc, head=CountingHead(256, 1, nc))
    return _parts(Network(net), FcosLoss(net), postprocess)


def _ssdlite(name: str, nc: int) -> Parts:
    net = _untrained(name, nc + 1)
    net.backbone.extra = nn.ModuleList(Float32(*block) for block in net.backbone.extra)
    return _parts(Network(net), SsdLoss(net), postprocess_ssd, needs_squares=True, norm_stride=SSDLITE_STRIDE)


def _rcnn(name: str, nc: int) -> Parts:
    network = TwoStageNetwork(_untrained(name, nc + 1))
    return _parts(network, TwoStageLoss(network.net), postprocess_rcnn, needs_targets=True, reads_values=True)


def _untrained(name: str, classes: int, **more: Any) -> Any:
    return getattr(detection, name)(weights=None, weights_backbone=None, num_classes=classes, **more)


def _parts(network: nn.Module, loss: Criterion, postprocess: Postprocess, **more: Any) -> Parts:
    return Parts(network, loss, postprocess, can_compile=False, can_split=False, **more)


# What makes each model, from its name and the number of classes.
MODELS: dict[str, Callable[[str, int], Parts]] = {
    **dict.fromkeys(("retinanet_resnet50_fpn", "retinanet_resnet50_fpn_v2", SMALL), _retinanet),
    "fcos_resnet50_fpn": _fcos,
    "ssdlite320_mobilenet_v3_large": _ssdlite,
    **dict.fromkeys((f"fasterrcnn_{name}" for name in RCNNS), _rcnn),
}


class Network(Classifier):
    """torchvision's detector without its resizing, behind the normalisation of its images."""

    def forward(self, images: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """Return cls_logits (b, n, nc), bbox_regression (b, n, 4), anchors (n, 4) xyxy in px, cells of each level (l,).

        FCOS has bbox_ctrness (b, n, 1) too, and SSDlite's classes are nc + 1, the first of which is the background.
        """
        net: Any = self.net
        images = (images - self.mean) / self.std
        features = list(net.backbone(images).values())
        anchors = anchors_of(net.anchor_generator, images, features)
        cells = [level.shape[2] * level.shape[3] for level in features]
        cells_of_levels = torch.tensor(cells, device=images.device)
        return {**net.head(features), "anchors": anchors, "cells": cells_of_levels}


class Float32(nn.Sequential):
    """Layers that are computed in float32.

    In bf16 on a CPU, the gradient of a depthwise convolution with stride 2 of a single cell has undefined values (torch
    2.15).
    """

    def forward(self, features: Tensor) -> Tensor:
        """Run the layers on features, and return the last layer's output."""
        device = "cuda" if features.is_cuda else "cpu"
        with torch.autocast(device, enabled=False):
            features = features.to(torch.promote_types(features.dtype, torch.float32))
            for layer in self:
                features = layer(features)
        return features


def anchors_of(generator: Any, images: Tensor, features: Sequence[Tensor]) -> Tensor:
    """Return the anchors (n, 4) xyxy px of an image, in float32: in bf16 they would be off by up to two pixels."""
    # The generator only reads the features' shapes and type.
    levels = [level.new_zeros((), dtype=torch.float32).expand(level.shape) for level in features]
    anchors: Tensor = generator(ImageList(images, [images.shape[2:]]), levels)[0]
    return anchors


class RetinaNetLoss(Criterion):
    """torchvision's loss: the mean over the images of focal loss and box loss, each per matched anchor of an image."""

    terms: tuple[str, ...] = ("cls", "box")
    validates = True

    def __init__(self, net: Any) -> None:
        super().__init__([1.0] * len(self.terms))
        self._compute = net.compute_loss  # its matcher and its coder have no weights

    def assigner(self, model: Any, /) -> Assign:
        """Return `boxes_of`."""
        return boxes_of

    def forward(
        self, outputs: dict[str, Tensor], targets: Targets, size: ImageSize, /
    ) -> tuple[Tensor, Tensor]:
        """Return the sums (2, 1) and the images (1,)."""
        images = len(outputs["cls_logits"])
        labels = labels_of(targets["boxes"], images)
        losses = self._compute(labels, heads_of(outputs), [outputs["anchors"]] * images)
        means = torch.stack((losses["classification"], losses["bbox_regression"]))
        count = torch.full((1,), images, dtype=torch.float64, device=targets["boxes"].device)
        return means[:, None] * images, count


class CountingHead(FCOSHead):  # type: ignore[misc]
    """FCOS's head, whose losses come with the number of matched cells, which the library divides them by."""

    def compute_loss(self, targets: Any, head_outputs: Any, anchors: Any, matched_idxs: list[Tensor]) -> Any:
        """Return the library's losses, and the number of matched cells."""
        losses = super().compute_loss(targets, head_outputs, anchors, matched_idxs)
        of_images = [(matches >= 0).sum() for matches in matched_idxs]
        return {**losses, "matched": torch.stack(of_images).sum()}


class FcosLoss(RetinaNetLoss):
    """torchvision's loss of FCOS: focal loss, GIoU loss and centreness, each per matched cell of all images."""

    terms = ("cls", "box", "ctr")

    def forward(
        self, outputs: dict[str, Tensor], targets: Targets, size: ImageSize, /
    ) -> tuple[Tensor, Tensor]:
        """Return the sums (3, 1) and the matched cells (1,)."""
        images = len(outputs["cls_logits"])
        cells = outputs["cells"].tolist()
        labels = labels_of(targets["boxes"], images)
        losses = self._compute(labels, heads_of(outputs), [outputs["anchors"]] * images, cells)
        means = torch.stack((losses["classification"], losses["bbox_regression"], losses["bbox_ctrness"]))
        matched = losses["matched"]
        sums = means * matched.clamp(min=1)
        return sums[:, None], matched.double()[None]


class SsdLoss(RetinaNetLoss):
    """torchvision's loss of SSD: cross entropy with hard negatives of each image, and box loss, per matched anchor."""

    def __init__(self, net: Any) -> None:
        super().__init__(net)
        self._matcher = net.proposal_matcher

    def forward(
        self, outputs: dict[str, Tensor], targets: Targets, size: ImageSize, /
    ) -> tuple[Tensor, Tensor]:
        """Return the sums (2, 1) and the matched anchors (1,)."""
        images = len(outputs["cls_logits"])
        anchors = outputs["anchors"]
        labels = labels_of(targets["boxes"], images, first=1)
        no_match = torch.full((len(anchors),), -1, device=anchors.device)
        matches = []  # of each image: the number of each anchor's box, negative without one
        for image_labels in labels:
            boxes = image_labels["boxes"]
            # The matcher refuses images without boxes.
            matches.append(self._matcher(box_iou(boxes, anchors)) if len(boxes) else no_match)
        matched = torch.stack([(boxes >= 0).sum() for boxes in matches]).sum()
        losses = self._compute(labels, heads_of(outputs), [anchors] * images, matches)
        means = torch.stack((losses["classification"], losses["bbox_regression"]))
        sums = means * matched.clamp(min=1)
        return sums[:, None], matched.double()[None]


class Sampler(BalancedPositiveNegativeSampler):  # type: ignore[misc]
    """torchvision's random choice of anchors or proposals, which here depends on the image and not on the rank."""

    seeds: Sequence[int]  # of each image
    drawn = 0  # by the last call

    def __call__(self, labels: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the masks of the chosen positives and negatives of each image."""
        positives: list[Tensor] = []
        negatives: list[Tensor] = []
        for seed, image_labels in zip(self.seeds, labels, strict=True):
            torch.manual_seed(seed)
            positive, negative = super().__call__([image_labels])
            positives += positive
            negatives += negative
        drawn = torch.stack([mask.sum() for mask in (*positives, *negatives)]).sum()
        self.drawn = int(drawn)
        return positives, negatives


class TwoStageNetwork(Classifier):
    """torchvision's Faster R-CNN without its resizing, behind the normalisation of its images."""

    steps: Tensor

    def __init__(self, net: Any) -> None:
        super().__init__(net)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        for stage in (net.rpn, net.roi_heads):
            original = stage.fg_bg_sampler
            stage.fg_bg_sampler = Sampler(original.batch_size_per_image, original.positive_fraction)

    @property
    def parts(self) -> list[tuple[str, nn.Module]]:
        """The backbone, and both stages, which are the head."""
        net: Any = self.net
        return [("backbone", net.backbone), ("head", nn.ModuleList((net.rpn, net.roi_heads)))]

    def forward(self, images: Tensor, labels: Labels | None = None) -> dict[str, Any]:  # type: ignore[override]
        """Find and classify proposals: p of all images together, of which the first are the first image's.

        Return objectness (b n, 1), deltas (b n, 4) and anchors (n, 4) of the first stage, proposals [(p_k, 4)] xyxy
        px, cls_logits (p, nc + 1) and bbox_regression (p, 4 (nc + 1)). With `labels` the proposals are a choice for
        training, with their targets classes [(p_k,)] and offsets [(p_k, 4)].
        """
        net: Any = self.net
        if labels is not None:
            self._seed(images)
        images = (images - self.mean) / self.std
        features = net.backbone(images)
        sizes = [tuple(images.shape[2:])] * len(images)
        levels = list(features.values())
        anchors = anchors_of(net.rpn.anchor_generator, images, levels)
        level_objectness, level_deltas = net.rpn.head(levels)
        predictions = [level[0].numel() for level in level_objectness]  # of an image
        objectness, deltas = concat_box_prediction_layers(level_objectness, level_deltas)
        objectness = objectness.float()
        deltas = deltas.float()
        boxes = net.rpn.box_coder.decode(deltas.detach(), [anchors] * len(images)).view(len(images), -1, 4)
        proposals, _ = net.rpn.filter_proposals(boxes, objectness, sizes, predictions)
        if levels[0].dtype == torch.float64:
            # The pooling wants the features' type, or autocast converts these.
            proposals = [of_image.double() for of_image in proposals]
        first_stage = {"objectness": objectness, "deltas": deltas, "anchors": anchors}
        choice = {}
        if labels is not None:
            proposals, _, classes, offsets = net.roi_heads.select_training_samples(proposals, labels)
            choice = {"classes": classes, "offsets": offsets}
        pooled = net.roi_heads.box_roi_pool(features, proposals, sizes)
        logits, regression = net.roi_heads.box_predictor(net.roi_heads.box_head(pooled))
        return {
            **first_stage,
            **choice,
            "proposals": proposals,
            "cls_logits": logits.float(),
            "bbox_regression": regression.float(),
        }

    def _seed(self, images: Tensor) -> None:
        """Seed the samplers by the pixels of each image and the number of the step."""
        self.steps += 1
        pixels = (images * 255).round().long()
        seeds = (pixels.sum((1, 2, 3)) + self.steps * 1_000_003).tolist()
        net: Any = self.net
        net.rpn.fg_bg_sampler.seeds = seeds
        net.roi_heads.fg_bg_sampler.seeds = seeds


class TwoStageLoss(Criterion):
    """torchvision's loss of Faster R-CNN: class and box losses of each stage, per anchor or proposal that it chose."""

    terms = ("cls", "box", "obj", "rpn_box")

    def __init__(self, net: Any) -> None:
        super().__init__([1.0] * len(self.terms))
        self._rpn = (net.rpn,)  # in a tuple: its weights are the network's

    def assigner(self, model: Any, /) -> Assign:
        """Return `boxes_of`."""
        return boxes_of

    def outputs_of(self, network: nn.Module, images: Tensor, targets: Targets, /) -> Outputs:
        """Run the network on the images, and let it choose among the proposals by their boxes."""
        return network(images, labels_of(targets["boxes"], len(images), first=1))

    def forward(self, outputs: dict[str, Any], targets: Targets, size: ImageSize, /) -> tuple[Tensor, Tensor]:
        """Return the sums (4, 2), and the chosen proposals and anchors (2,)."""
        (rpn,) = self._rpn
        images = len(outputs["proposals"])
        anchors = [outputs["anchors"]] * images
        labels = labels_of(targets["boxes"], images, first=1)
        objects, boxes = rpn.assign_targets_to_anchors(anchors, labels)  # of each anchor
        wanted = rpn.box_coder.encode(boxes, anchors)
        first = rpn.compute_loss(outputs["objectness"], outputs["deltas"], objects, wanted)
        second = fastrcnn_loss(
            outputs["cls_logits"],
            outputs["bbox_regression"],
            outputs["classes"],
            [of_image.float() for of_image in outputs["offsets"]],
        )
        proposals = len(outputs["cls_logits"])
        counts = torch.tensor([proposals, rpn.fg_bg_sampler.drawn], device=boxes[0].device)
        means = torch.stack((*second, *first))
        is_divisor = torch.eye(2, device=counts.device).repeat_interleave(2, 0)  # for each term and count
        return means[:, None] * is_divisor * counts, counts.double()


def heads_of(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of the network's head in float32."""
    return {name: values.float() for name, values in outputs.items() if name not in ("anchors", "cells")}


def labels_of(boxes: Tensor, images: int, first: int = 0) -> Labels:
    """Return the labels of each image as torchvision takes them, from rows (n, 6) of `boxes_of`.

    `first` is the number of the first class: 1 where 0 is the background.
    """
    labels = []
    for k in range(images):
        own = boxes[boxes[:, 0] == k]
        labels.append({"boxes": own[:, 2:], "labels": own[:, 1].long() + first})
    return labels


def boxes_of(
    labels: BoxLabels, images: int, height: int, width: int, rows: Rows = exact
) -> dict[str, Tensor]:
    """Return `boxes` float32 (n, 6), [image, class, x1, y1, x2, y2] in pixels; without rows that pad."""
    centre = labels[:, 2:4]
    half = labels[:, 4:] / 2
    corners = np.concatenate((centre - half, centre + half), 1)
    in_pixels = corners * np.array([width, height, width, height], np.float32)
    return {"boxes": torch.from_numpy(np.concatenate((labels[:, :2], in_pixels), 1))}


def postprocess(model: Any, outputs: dict[str, Tensor], limits: Limits) -> list[Detections]:
    """Return the detections of each image, by torchvision's thresholds and suppression over all levels together."""
    heads = heads_of(outputs)
    if limits.classes is not None:
        logits = heads["cls_logits"].clone()
        others = [k for k in range(logits.shape[2]) if k not in limits.classes]
        logits[..., others] = -torch.inf
        heads["cls_logits"] = logits
    one_level = {name: [values] for name, values in heads.items()}
    images = len(outputs["cls_logits"])
    anchors = [[outputs["anchors"]]] * images
    net = limited(model.net, limits)
    found = net.postprocess_detections(one_level, anchors, [NO_BORDER] * images)
    return [Detections(image["boxes"].cpu(), image["scores"].cpu(), image["labels"].cpu()) for image in found]


def postprocess_ssd(model: Any, outputs: dict[str, Tensor], limits: Limits) -> list[Detections]:
    """Return the detections of each image, by torchvision's thresholds and suppression per class."""
    heads = heads_of(outputs)
    images = len(outputs["cls_logits"])
    heads["cls_logits"] = without_others(heads["cls_logits"], limits)
    anchors = [outputs["anchors"]] * images
    net = limited(model.net, limits)
    detections = []
    for image in net.postprocess_detections(heads, anchors, [NO_BORDER] * images):
        classes = image["labels"].cpu() - 1  # without the background
        detections.append(Detections(image["boxes"].cpu(), image["scores"].cpu(), classes))
    return detections


def postprocess_rcnn(model: Any, outputs: dict[str, Any], limits: Limits) -> list[Detections]:
    """Return the detections of each image, by torchvision's thresholds and suppression per class."""
    logits = without_others(outputs["cls_logits"], limits)
    proposals = outputs["proposals"]
    second_stage = limited(model.net.roi_heads, limits)
    borders = [NO_BORDER] * len(proposals)
    found = second_stage.postprocess_detections(logits, outputs["bbox_regression"], proposals, borders)
    detections = []
    for boxes, scores, labels in zip(*found, strict=True):
        classes = labels.cpu() - 1  # without the background
        detections.append(Detections(boxes.cpu(), scores.cpu(), classes))
    return detections


def limited(net: Any, limits: Limits) -> Any:
    """Return a network of torchvision, or a part of it, with these limits."""
    net.score_thresh = limits.confidence
    net.nms_thresh = limits.iou
    net.detections_per_img = limits.most
    return net


def without_others(logits: Tensor, limits: Limits) -> Tensor:
    """Return the logits (..., nc + 1) after which only the wanted classes have a probability, which does not change.

    The others' is added to the background's.
    """
    if limits.classes is None:
        return logits
    wanted = [1 + k for k in limits.classes]
    others = [k for k in range(logits.shape[-1]) if k not in wanted]
    merged = torch.full_like(logits, -torch.inf)
    merged[..., wanted] = logits[..., wanted]
    merged[..., 0] = logits[..., others].logsumexp(-1)
    return merged
