"""Training state: position in the run, results of a step, random seeds, and batch norm's statistics."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from trainer.weights.checkpoint import ShareState


@dataclass
class TrainState:
    """Position and scores of a run; the field names are keys of the checkpoint."""

    epoch: int = 0  # the current epoch, from 0
    step: int = 0  # finished steps of this epoch
    last_move: int = -1  # global step of the last optimizer step
    images: int = 0  # of this epoch, on all ranks
    best: float = -1.0
    best_epoch: int = -1
    best_scores: dict[str, float] = field(default_factory=dict)  # the task's headlines
    skipped: tuple[int, ...] = ()  # steps left out because their loss was not finite
    tracker: tuple[str, str] = ("", "")  # of --track: its name and the run's ID
    averaged: bool = False  # whether batch norm's statistics were averaged over the ranks after this epoch


@dataclass
class StepResult:
    """Result of a step, the same on all ranks."""

    stop: bool = False
    save: bool = False
    updated: bool = False  # whether the optimizer made a step


class NotFinite(Exception):
    """A loss or gradient is infinite or NaN; `step` is the global step, the same on all ranks."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Seed every global random generator for one step, so that a resumed run draws the same numbers."""
    mixed = int(np.random.SeedSequence([3, seed, step, rank]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def is_statistic(name: str) -> bool:
    """Return whether a buffer is a running mean or variance of batch norm."""
    return name.endswith(("running_mean", "running_var"))


def statistics_of(module: nn.Module) -> dict[str, Tensor]:
    """Return batch norm's running means and variances."""
    return {name: buffer for name, buffer in module.named_buffers() if is_statistic(name)}


class RankState(TypedDict):
    """What a rank adds to a checkpoint."""

    pending: Tensor  # see MeterState
    bad: int
    statistics: list[dict[str, Tensor]]  # batch norm's, of this rank's part of the model and of its average


def merge_stages(stages: Sequence[RankState], order: Sequence[str]) -> ShareState:
    """Merge the states of the pipeline stages that process the same images; each stage holds a part of the model."""
    statistics = []
    for model in range(2):  # the network and its average
        merged: dict[str, Tensor] = {}
        for stage in stages:
            merged |= stage["statistics"][model]
        statistics.append([merged[name] for name in order if is_statistic(name)])
    pending = [stage["pending"] for stage in stages]
    total = sum(pending, start=torch.zeros_like(pending[0]))
    return {"pending": total, "statistics": statistics}
