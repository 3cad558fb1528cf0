"""The networks that can be trained; a new one is a file here and a line in its task."""

from collections.abc import Sequence

from torch import nn

from trainer.errors import TrainerError


def freeze(model: nn.Module, layers: Sequence[int]) -> int:
    """Freeze the layers with these numbers (-1 alone: all but the head); return the number of frozen parameters.

    As in YOLOv5, batch norm's running statistics are still updated.
    """
    parts: list[tuple[str, nn.Module]] = getattr(model, "parts", None) or list(model.named_children())
    listed = ", ".join(f"{k} {name}" for k, (name, _) in enumerate(parts))
    numbers = set(range(len(parts)))
    if tuple(layers) == (-1,):
        head = set(parts[-1][1].parameters())
        frozen = [p for p in model.parameters() if p not in head]  # a ViT's class token is in no part
    elif not set(layers) <= numbers:
        raise TrainerError(
            f"--freeze: no layer {min({*layers} - numbers)}", f"the model's layers are {listed}"
        )
    elif set(layers) == numbers:
        raise TrainerError("--freeze: no layer is left to train", f"the model's layers are {listed}")
    else:
        frozen = [p for k in set(layers) for p in parts[k][1].parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return sum(p.numel() for p in frozen)
