"""torchvision's classification and segmentation models, by their names there, for images in 0..1."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

from trainer.distributed.machine_lock import one_per_machine
from trainer.errors import TrainerError
from trainer.weights.official import MALFORMED

# Of ImageNet's images, as torchvision's weights want them.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
OWN_WEIGHTS = "torchvision"
# Of a segmentation network's batch norm: torch's default. With MobileNet's 0.01 the statistics lag hundreds of steps.
_MOMENTUM = 0.1
_SOME = (
    "resnet18",
    "resnet50",
    "resnet101",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "convnext_tiny",
    "vit_b_16",
)


class Classifier(nn.Module):
    """A torchvision network behind the normalisation that its weights were trained with."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        for name, values in (("mean", MEAN), ("std", STD)):
            self.register_buffer(name, torch.tensor(values).view(1, 3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Float (b, 3, h, w) in 0..1 -> logits (b, nc)."""
        logits: Tensor = self.net((images - self.mean) / self.std)
        return logits

    @property
    def parts(self) -> list[tuple[str, nn.Module]]:
        """The network's own parts that have parameters, with their names; the last one is the head."""
        return [
            (name, part) for name, part in self.net.named_children() if any(True for _ in part.parameters())
        ]


class Segmenter(Classifier):
    """A torchvision network behind the normalisation that its weights were trained with."""

    def forward(self, images: Tensor) -> Tensor:
        """Float (b, 3, h, w) in 0..1 -> logits (b, nc, h, w)."""
        logits: Tensor = self.net((images - self.mean) / self.std)["out"]
        return logits

    @property
    def pools(self) -> bool:
        """Whether batch norm sees a single value of each image, its mean (DeepLabV3's image pooling)."""
        return any("ASPPPooling" in type(module).__name__ for module in self.modules())


def build_classifier(name: str, nc: int, imgsz: int) -> Classifier:
    """Build torchvision's network `name` for `nc` classes, untrained; TrainerError if `imgsz` is not supported."""
    known = [m for m in models.list_models(module=models) if not m.startswith("quantized_")]
    if name not in known:
        what = f"--cfg {name}: torchvision has no classification model of that name"
        raise TrainerError(what, f"some are {', '.join(_SOME)}")
    if name in ("googlenet", "inception_v3"):
        raise TrainerError(
            f"--cfg {name}: its auxiliary training output is not supported", "use another model"
        )
    side = {"image_size": imgsz} if name.startswith("vit_") else {}  # a ViT is made for images of one side
    try:
        model = Classifier(models.get_model(name, weights=None, num_classes=nc, **side))
        # A run on the meta device has no arithmetic.
        shapes = {key: t.to("meta") for key, t in (*model.named_parameters(), *model.named_buffers())}
        with torch.no_grad():
            torch.func.functional_call(model.eval(), shapes, torch.empty(1, 3, imgsz, imgsz, device="meta"))
    except (AssertionError, RuntimeError) as error:  # AssertionError: a ViT's patches would not fill the side
        raise TrainerError(
            f"--cfg {name} with --imgsz {imgsz}: the network does not accept such images: {str(error).splitlines()[0]}",
            "use --imgsz 224, which all of them accept, or another --cfg",
        ) from error
    return model.train()


def build_segmenter(name: str, nc: int) -> Segmenter:
    """Build torchvision's network `name` for `nc` classes, untrained and without the auxiliary head."""
    known = models.list_models(module=models.segmentation)
    if name not in known:
        what = f"--cfg {name}: torchvision has no segmentation model of that name"
        raise TrainerError(what, f"use one of {', '.join(known)}")
    model = Segmenter(models.get_model(name, weights=None, weights_backbone=None, num_classes=nc))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = _MOMENTUM
    return model


def own_weights(name: str, imgsz: int) -> Mapping[str, Tensor]:
    """Return torchvision's weights for its network `name` with our tensor names, downloaded if necessary.

    Its builders read them, because older files have other tensor names. A ViT's embedding of places is enlarged or
    shrunk to images of `imgsz` px. Nothing in the file is executed; TrainerError where it cannot be had or is damaged.
    """
    folder = Path(torch.hub.get_dir()).absolute()
    # torchvision does not ask for it.
    tensors_only = patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"})
    try:
        with one_per_machine(folder), tensors_only:
            net: Any = models.get_model(name, weights="DEFAULT", progress=False)
    except MALFORMED as error:
        first = (str(error).splitlines() or [""])[0]
        raise TrainerError(
            f"--weights {OWN_WEIGHTS}: the weights of {name} are not available: {type(error).__name__}: {first}",
            f"put the whole file into {folder}/checkpoints (if you remove a damaged one, it is fetched again), or "
            "start from random weights: --weights ''",
        ) from None
    state = net.state_dict()
    if isinstance(net, VisionTransformer):
        state = interpolate_embeddings(imgsz, net.patch_size, state)
    return {f"net.{key}": value for key, value in state.items()}
