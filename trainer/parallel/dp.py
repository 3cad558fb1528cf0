"""--parallel dp: one process drives several GPUs, each with a share of every batch and a copy of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from trainer import dist
from trainer.config import Settings
from trainer.errors import TrainerError
from trainer.parallel.ddp import Ddp


class Dp(Ddp):
    """torch's DataParallel: every step copies the model to all GPUs and gathers their outputs on the first one."""

    def __init__(self, settings: Settings, world: dist.World, device: torch.device) -> None:
        if world.size > 1:
            raise TrainerError(
                f"--parallel dp is one process for all GPUs, and this is one of {world.size}",
                "start it without torchrun and --ranks, or use --parallel ddp",
            )
        for option, given in (
            ("--sync-bn", settings.sync_bn),
            ("--compile", settings.compile),
            ("--grad-compress", settings.grad_compress != "none"),
        ):
            if given:
                raise TrainerError(f"--parallel dp does not go with {option}", "use --parallel ddp")
        super().__init__(settings, world, device)
        self._gpus = dist.gpu_numbers(settings.device) if device.type == "cuda" else []
        if len(self._gpus) > 1:
            listed = ",".join(map(str, self._gpus))
            self.said = (
                f"DataParallel over GPUs {listed}; --parallel ddp --device {listed}, a process for each, is faster"
            )
        else:
            where = f"GPU {device.index}" if self._gpus else "the processor"
            self.said = f"--parallel dp: {where} alone, so there is nothing to share; --device 0,1 names GPUs"

    def refresh(self) -> None:
        """Wrap the model anew."""
        self._net = self.module
        if len(self._gpus) > 1:
            copied = Precise(self.module, self._conditions.autocast)
            self._net = nn.DataParallel(copied, device_ids=self._gpus)


class Precise(nn.Module):
    """A network that enters its precision itself: DataParallel's threads know whether there is one, but not which."""

    def __init__(self, module: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._module, self._autocast = module, autocast

    def forward(self, images: Tensor) -> Any:
        """The network's outputs."""
        with self._autocast():
            return self._module(images)
