"""torchvision's own weights, which only its builders can read: older files have other names of tensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision import models
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

from trainer.errors import TrainerError
from trainer.machine_lock import one_per_machine
from trainer.weights.official import MALFORMED

OWN_WEIGHTS = "torchvision"
_TENSORS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def own_weights(name: str, imgsz: int) -> Mapping[str, Tensor]:
    """torchvision's weights for its network `name`, fetched where they are not there, with our names of tensors.

    A ViT's embedding of places is enlarged or shrunk to pictures of `imgsz` px. Nothing in the file is executed;
    TrainerError where it cannot be had or is damaged.
    """
    folder = Path(torch.hub.get_dir()).absolute()
    try:
        with one_per_machine(folder), _tensors_only():
            net: Any = models.get_model(name, weights="DEFAULT", progress=False)
    except MALFORMED as error:
        first = (str(error).splitlines() or [""])[0]
        raise TrainerError(
            f"--weights {OWN_WEIGHTS}: those of {name} cannot be had: {type(error).__name__}: {first}",
            f"put the whole file into {folder}/checkpoints (once a damaged one is removed, it is fetched again), or "
            "start from scratch with --weights ''",
        ) from None
    state = net.state_dict()
    if isinstance(net, VisionTransformer):
        state = interpolate_embeddings(imgsz, net.patch_size, state)
    return {f"net.{key}": value for key, value in state.items()}


@contextlib.contextmanager
def _tensors_only() -> Iterator[None]:
    """Inside, torch reads nothing but tensors from files, which torchvision does not ask for itself."""
    before = os.environ.get(_TENSORS_ONLY)
    os.environ[_TENSORS_ONLY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TENSORS_ONLY]
        else:
            os.environ[_TENSORS_ONLY] = before
