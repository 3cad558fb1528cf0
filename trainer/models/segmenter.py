"""torchvision's segmentation models, by their names there, as networks that take pictures in 0..1."""

from __future__ import annotations

from torch import Tensor, nn
from torchvision import models

from trainer.errors import TrainerError
from trainer.models.classifier import Classifier

# Of batch norm's running statistics: torch's usual one. MobileNet's own, 0.01, needs many hundred steps until the model
# that is validated is the one that was trained.
_MOMENTUM = 0.1


class Segmenter(Classifier):
    """A torchvision network behind the normalisation that its weights were trained with."""

    def forward(self, images: Tensor) -> Tensor:
        """Float (b, 3, h, w) in 0..1 -> logits (b, nc, h, w)."""
        logits: Tensor = self.net((images - self.mean) / self.std)["out"]
        return logits

    @property
    def pools(self) -> bool:
        """Whether batch norm sees a single value of each picture, its mean (DeepLabV3's image pooling)."""
        return any("ASPPPooling" in type(module).__name__ for module in self.modules())


def build_segmenter(name: str, nc: int) -> Segmenter:
    """torchvision's network `name` for `nc` classes, untrained and without the auxiliary head."""
    known = models.list_models(module=models.segmentation)
    if name not in known:
        raise TrainerError(
            f"--cfg {name}: torchvision has no segmentation model of that name", f"use one of {', '.join(known)}"
        )
    model = Segmenter(models.get_model(name, weights=None, weights_backbone=None, num_classes=nc))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = _MOMENTUM
    return model
