"""How well predicted classes agree with the wanted ones, as a loss can use it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

FOCAL_ALPHA = 0.25


def bce(logits: Tensor, wanted: Tensor, positive_weight: float = 1.0, gamma: float = 0.0) -> Tensor:
    """Element-wise binary cross entropy in float32, focal (Lin et al. 2017) when gamma is above 0."""
    logits = logits.float()
    weight = None if positive_weight == 1 else logits.new_tensor(positive_weight)
    loss = F.binary_cross_entropy_with_logits(logits, wanted, pos_weight=weight, reduction="none")
    if gamma > 0:
        p = logits.sigmoid()
        right = wanted * p + (1 - wanted) * (1 - p)
        alpha = wanted * FOCAL_ALPHA + (1 - wanted) * (1 - FOCAL_ALPHA)
        loss = loss * alpha * (1 - right) ** gamma
    return loss
