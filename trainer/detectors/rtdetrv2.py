"""RT-DETRv2 (Lv et al. 2024), by transformers: --cfg rtdetrv2-r18, r34, r50 or r101."""

from typing import Any

from transformers import RTDetrV2Config, RTDetrV2ForObjectDetection

from trainer.config import Hyp, ModelCfg
from trainer.detectors import Parts
from trainer.detectors.transformers_nets import InPairs, QueryLoss, describe, parts_of


def _resnet(depths: list[int], **more: Any) -> dict[str, Any]:
    return {"model_type": "rt_detr_resnet", "depths": depths, "out_indices": [2, 3, 4], **more}


_BASIC: dict[str, Any] = {"hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}
_SMALL: dict[str, Any] = {"encoder_in_channels": [128, 256, 512], "hidden_expansion": 0.5}
# What differs from the library's defaults, by the published configurations.
SIZES: dict[str, dict[str, Any]] = {
    "r18": {"backbone_config": _resnet([2, 2, 2, 2], **_BASIC), **_SMALL, "decoder_layers": 3},
    "r34": {"backbone_config": _resnet([3, 4, 6, 3], **_BASIC), **_SMALL, "decoder_layers": 4},
    "r50": {},
    "r101": {
        "backbone_config": _resnet([3, 4, 23, 3]),
        "encoder_hidden_dim": 384,
        "encoder_ffn_dim": 2048,
        "decoder_in_channels": [384, 384, 384],
    },
}


def build(cfg: ModelCfg, *, nc: int, where: str, hyp: Hyp, imgsz: int) -> Parts:
    """Build {"rtdetrv2": a size, or the library's configuration} for `nc` classes."""
    config = RTDetrV2Config(**describe(cfg, SIZES, nc, where))
    return parts_of(RTDetrV2ForObjectDetection(config).model, QueryLoss(InPairs(config), config))
