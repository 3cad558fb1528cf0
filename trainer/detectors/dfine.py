"""D-FINE (Peng et al. 2024), by transformers: --cfg dfine-n, s, m, l or x."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_convert
from transformers import DFineConfig, DFineForObjectDetection
from transformers.loss.loss_d_fine import DFineLoss, bbox2distance
from transformers.models.hgnet_v2.modeling_hgnet_v2 import HGNetV2LearnableAffineBlock

from trainer.config import Hyp, ModelCfg
from trainer.detectors import Parts
from trainer.detectors.transformers_nets import (
    NOISE,
    InPairs,
    Labels,
    Matcher,
    QueryLoss,
    describe,
    overlap,
    parts_of,
)

TEMPERATURE = 5  # of the distributions that the last layer teaches the others
_BACKBONES: dict[str, dict[str, Any]] = {  # HGNetV2 (PaddlePaddle)
    "B0": {
        "stem_channels": [3, 16, 16],
        "stage_in_channels": [16, 64, 256, 512],
        "stage_mid_channels": [16, 32, 64, 128],
        "stage_out_channels": [64, 256, 512, 1024],
        "stage_num_blocks": [1, 1, 2, 1],
        "stage_numb_of_layers": [3, 3, 3, 3],
        "use_learnable_affine_block": True,
    },
    "B2": {
        "stem_channels": [3, 24, 32],
        "stage_in_channels": [32, 96, 384, 768],
        "stage_mid_channels": [32, 64, 128, 256],
        "stage_out_channels": [96, 384, 768, 1536],
        "stage_num_blocks": [1, 1, 3, 1],
        "stage_numb_of_layers": [4, 4, 4, 4],
        "use_learnable_affine_block": True,
    },
    "B4": {
        "stem_channels": [3, 32, 48],
        "stage_in_channels": [48, 128, 512, 1024],
        "stage_mid_channels": [48, 96, 192, 384],
        "stage_out_channels": [128, 512, 1024, 2048],
        "stage_num_blocks": [1, 1, 3, 1],
        "stage_numb_of_layers": [6, 6, 6, 6],
    },
    "B5": {
        "stem_channels": [3, 32, 64],
        "stage_in_channels": [64, 128, 512, 1024],
        "stage_mid_channels": [64, 128, 256, 512],
        "stage_out_channels": [128, 512, 1024, 2048],
        "stage_num_blocks": [1, 2, 5, 2],
        "stage_numb_of_layers": [6, 6, 6, 6],
    },
}


def _backbone(name: str, **more: Any) -> dict[str, Any]:
    channels = _BACKBONES[name]["stage_out_channels"]
    return {
        "model_type": "hgnet_v2",
        "hidden_sizes": channels,
        "out_indices": [2, 3, 4],
        **_BACKBONES[name],
        **more,
    }


# What differs from the library's defaults, by the published configurations.
SIZES: dict[str, dict[str, Any]] = {
    "n": {
        "backbone_config": _backbone("B0", out_indices=[3, 4]),
        "encoder_in_channels": [512, 1024],
        "encoder_hidden_dim": 128,
        "encoder_ffn_dim": 512,
        "encode_proj_layers": [1],
        "hidden_expansion": 0.34,
        "depth_mult": 0.5,
        "d_model": 128,
        "decoder_ffn_dim": 512,
        "decoder_in_channels": [128, 128],
        "decoder_layers": 3,
        "decoder_n_points": [6, 6],
        "num_feature_levels": 2,
        "feat_strides": [16, 32],
    },
    "s": {
        "backbone_config": _backbone("B0"),
        "encoder_in_channels": [256, 512, 1024],
        "hidden_expansion": 0.5,
        "depth_mult": 0.34,
        "decoder_layers": 3,
        "decoder_n_points": [3, 6, 3],
    },
    "m": {
        "backbone_config": _backbone("B2"),
        "encoder_in_channels": [384, 768, 1536],
        "depth_mult": 0.67,
        "decoder_layers": 4,
        "decoder_n_points": [3, 6, 3],
    },
    "l": {"backbone_config": _backbone("B4"), "decoder_n_points": [3, 6, 3]},
    "x": {
        "backbone_config": _backbone("B5"),
        "encoder_hidden_dim": 384,
        "encoder_ffn_dim": 2048,
        "decoder_in_channels": [384, 384, 384],
        "decoder_n_points": [3, 6, 3],
        "reg_scale": 8.0,
    },
}


def build(cfg: ModelCfg, *, nc: int, where: str, hyp: Hyp, imgsz: int) -> Parts:
    """Build {"dfine": a size, or the library's configuration} for `nc` classes."""
    config = DFineConfig(**describe(cfg, SIZES, nc, where))
    net = DFineForObjectDetection(config).model
    for module in net.modules():
        if isinstance(module, HGNetV2LearnableAffineBlock):
            module.__class__ = Affine
    return parts_of(net, FineLoss(SummedLoss(config), config))


class Affine(HGNetV2LearnableAffineBlock):  # type: ignore[misc]
    """The library's block, without its conversion of bf16 to float32: a scale without dimensions has a lower priority.

    A step of D-FINE-n in bf16 takes a tenth less time on a CPU.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Scale and shift the features."""
        scaled: Tensor = features * self.scale.reshape(()) + self.bias.reshape(())
        return scaled


class SummedLoss(DFineLoss, InPairs):  # type: ignore[misc]
    """The library's loss, whose distillation is two sums: over the matched queries, and over the others."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.matcher = Matcher(config)

    def loss_local(
        self,
        outputs: dict[str, Tensor],
        targets: Labels,
        indices: Any,
        num_boxes: float,
        T: int = TEMPERATURE,
    ) -> dict[str, Tensor]:
        """Return the localisation loss, and the sums (2,) of the distillation loss."""
        if "pred_corners" not in outputs:
            return {}
        corners = outputs["pred_corners"]
        teacher = outputs["teacher_corners"]
        matched, boxes = self.matched(targets, indices)
        with torch.no_grad():
            points = outputs["ref_points"][matched]
            wanted = box_convert(boxes, "cxcywh", "xyxy")
            bins, right, left = bbox2distance(points, wanted, self.max_num_bins, self.reg_scale, self.up)
            iou, _ = overlap(outputs["pred_boxes"][matched], boxes)
        sides = corners[matched].reshape(-1, self.max_num_bins + 1)
        side_weight = iou.repeat_interleave(4)
        fine = self.unimodal_distribution_focal_loss(
            sides, bins, right, left, side_weight, avg_factor=num_boxes
        )
        if torch.equal(corners, teacher):  # the last layer
            return {"loss_fgl": fine, "loss_ddf": corners.new_zeros(2)}
        is_matched = torch.zeros(corners.shape[:2], dtype=torch.bool, device=corners.device)
        is_matched[matched] = True
        with torch.no_grad():
            weight = outputs["teacher_logits"].sigmoid().amax(-1)
            weight[matched] = iou
        shape = (*corners.shape[:2], 4, self.max_num_bins + 1)
        mine = corners.reshape(shape) / T
        theirs = teacher.detach().reshape(shape) / T
        divergence = F.kl_div(mine.log_softmax(-1), theirs.softmax(-1), reduction="none").sum((2, 3))
        loss = divergence * weight * T**2
        distilled = torch.stack((loss[is_matched].sum(), loss[~is_matched].sum()))
        return {"loss_fgl": fine, "loss_ddf": distilled}


class FineLoss(QueryLoss):
    """D-FINE's loss.

    The distillation is the mean over the matched queries and the mean over the others, each weighted by the root of
    their number. So its sums have divisors of their own, which are not counts.
    """

    terms = ("vfl", "bbox", "giou", "fgl", "ddf")

    def counts(self, outputs: dict[str, Any], labels: Labels) -> list[int]:
        """Return the numbers of the boxes, of the matched and other queries, and of the same of the noisy copies."""
        boxes = [len(image_labels["boxes"]) for image_labels in labels]
        images = len(labels)
        noise = outputs.get(NOISE)
        if noise:
            noisy, queries = noise["dn_num_split"]  # of an image
            copies = noise["dn_num_group"] * sum(boxes)
        else:
            noisy = 0
            queries = outputs["enc_topk_logits"].shape[1]
            copies = 0
        matched = sum(min(count, queries) for count in boxes)
        return [sum(boxes), matched, queries * images - matched, copies, noisy * images - copies]

    def divisors(self, counts: Tensor, /) -> Tensor:
        """Return the boxes, and for the others 4 root(n) (root(matched) + root(others)): a query has four sides."""
        # Rows: the queries, and the noisy copies. Columns: matched, others.
        roots = counts[1:].clamp(min=0).sqrt().view(2, 2)
        divisors = 4 * roots * roots.sum(1, keepdim=True)
        return torch.cat((counts[:1], divisors.flatten()))

    def sums(self, name: str, value: Tensor, counts: Tensor) -> Tensor:
        """Return the sums (5,) whose quotients are a loss of the library."""
        if not name.startswith("loss_ddf"):
            return super().sums(name, value, counts)
        before = 3 if "_dn_" in name else 1
        after = 5 - before - 2
        return F.pad(value, (before, after))
