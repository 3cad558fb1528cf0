"""Training on the device "meta", whose tensors have no values and need no memory, and a count of its operations.

Used by tests, and by benchmarks/step.py. Simulates no streams, and no process group.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config import Settings
from trainer.distributed.comm import World
from trainer.engine import update
from trainer.engine.events import Events
from trainer.engine.optimizer import build_optimizer
from trainer.engine.trainer import Trainer
from trainer.losses.anchored import AnchorTargets, DetectionLoss

META = torch.device("meta")
#: Operations that launch no kernel.
VIEWS = (
    "view",
    "reshape",
    ".t.",
    "transpose",
    "permute",
    "expand",
    "select",
    "slice",
    "squeeze",
    "detach",
    "alias",
)
VIEWS += ("split", "unbind", "as_strided", "empty")
ANCHORS = np.array(
    [[[1.25, 1.625], [2, 3.75], [4.125, 2.875]]] * 3, np.float32
)  # meta tensors have no values


class Launches(TorchDispatchMode):
    """Counts operations by name, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        tensors = [each for each in torch.utils._pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
        if any(each.device == META for each in tensors) and not any(word in name for word in VIEWS):
            self.operations[name] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def meta_device() -> Iterator[None]:
    """Replace what the device "meta" lacks: the gradient norm, fused optimizers, autocast, and anchors with values."""
    with contextlib.ExitStack() as stack:
        replace = [
            ("trainer.strategies.strategy.nn.utils.clip_grad_norm_", lambda *_: torch.zeros((), device=META)),
            (f"{update.__name__}.build_optimizer", _unfused),
            ("trainer.losses.anchored.DetectionLoss.assigner", _assigner),
            ("trainer.engine.trainer.Trainer.autocast", lambda _: contextlib.nullcontext()),
        ]
        for name, value in replace:
            stack.enter_context(mock.patch(name, value))
        yield


def _unfused(*arguments: Any) -> torch.optim.Optimizer:
    made = build_optimizer(*arguments)
    for group in made.param_groups:
        group |= {"fused": False, "foreach": True}
    return made


def _assigner(loss: DetectionLoss, _: Any) -> AnchorTargets:
    return AnchorTargets(ANCHORS, loss.strides, 4.0)


def start(settings: Settings) -> Trainer:
    """Return a training on the device "meta", within `meta_device`."""
    training = Trainer(settings, World(), META, Events({}))
    training.start()
    training.local_model.train()
    return training
