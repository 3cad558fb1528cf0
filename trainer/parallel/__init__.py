"""How the ranks share the work of a training: one way of --parallel a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from trainer import dist
from trainer.config import Settings
from trainer.parallel.ddp import Ddp
from trainer.parallel.dp import Dp
from trainer.parallel.fsdp import Fsdp
from trainer.parallel.mode import Conditions, Mode
from trainer.parallel.pipeline import Pipeline
from trainer.parallel.state import load_model, load_optimizer, model_state, optimizer_state

MODES: dict[str, Callable[[Settings, dist.World, torch.device], Mode]] = {
    "ddp": Ddp,
    "dp": Dp,
    "fsdp": Fsdp,
    "pipeline": Pipeline,
}


def mode_of(settings: Settings, world: dist.World, device: torch.device) -> Mode:
    """The mode that --parallel names; an error where another option does not go with it."""
    return MODES[settings.parallel](settings, world, device)


def settings_for(settings: Settings, ranks: int) -> Settings:
    """The same training on so many ranks: a single one has nothing to shard, and is a pipeline of one stage."""
    if ranks > 1:
        return settings
    return replace(settings, parallel="ddp" if settings.parallel == "fsdp" else settings.parallel, stages=0)


__all__ = [
    "MODES",
    "Conditions",
    "Mode",
    "load_model",
    "load_optimizer",
    "mode_of",
    "model_state",
    "optimizer_state",
    "settings_for",
]
