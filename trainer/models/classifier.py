"""torchvision's classification models, by their names there, as networks that take pictures in 0..1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision import models

from trainer.errors import TrainerError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pictures, as torchvision's weights want them


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
        return [(name, part) for name, part in self.net.named_children() if any(True for _ in part.parameters())]


def build_classifier(name: str, nc: int, imgsz: int) -> Classifier:
    """torchvision's network `name` for `nc` classes, untrained; TrainerError if it takes no pictures of `imgsz` px."""
    known = [m for m in models.list_models(module=models) if not m.startswith("quantized_")]
    if name not in known:
        raise TrainerError(
            f"--cfg {name}: torchvision has no classification model of that name", f"some are {', '.join(_SOME)}"
        )
    if name in ("googlenet", "inception_v3"):
        raise TrainerError(f"--cfg {name}: it answers twice in training, which is not supported", "take another model")
    side = {"image_size": imgsz} if name.startswith("vit_") else {}  # a ViT is made for pictures of one side
    try:
        model = Classifier(models.get_model(name, weights=None, num_classes=nc, **side))
        refusal = _refusal(model, imgsz)
    except AssertionError as error:  # a ViT's patches would not fill the side
        refusal = str(error)
    if refusal:
        raise TrainerError(
            f"--cfg {name} with --imgsz {imgsz}: the network takes no such pictures: {refusal}",
            "use --imgsz 224, which all of them take, or another --cfg",
        )
    return model


def _refusal(model: Classifier, imgsz: int) -> str:
    """What the network says against pictures of this side, "" if nothing: tried without memory and arithmetic."""
    shapes = {name: t.to("meta") for name, t in (*model.named_parameters(), *model.named_buffers())}
    model.eval()
    try:
        with torch.no_grad():
            torch.func.functional_call(model, shapes, (torch.empty(1, 3, imgsz, imgsz, device="meta"),))
    except (AssertionError, RuntimeError) as error:
        return str(error).splitlines()[0]
    finally:
        model.train()
    return ""


_SOME = ("resnet18", "resnet50", "resnet101", "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny", "vit_b_16")


def freeze_parts(model: Classifier, layers: Sequence[int]) -> int:
    """Keep the parameters of the parts with these numbers as they are (-1 alone: all but the head): how many."""
    parts = model.parts
    listed = ", ".join(f"{k} {name}" for k, (name, _) in enumerate(parts))
    if tuple(layers) == (-1,):
        head = set(parts[-1][1].parameters())
        frozen = [p for p in model.parameters() if p not in head]  # a ViT's class token is in no part
    elif not set(layers) <= set(range(len(parts))):
        raise TrainerError(f"--freeze: there is no layer {max(layers)}", f"the model's layers are {listed}")
    elif set(layers) == set(range(len(parts))):
        raise TrainerError("--freeze: no layer is left to train", f"the model's layers are {listed}")
    else:
        frozen = [p for k in set(layers) for p in parts[k][1].parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return sum(p.numel() for p in frozen)
