"""Learning-rate schedule: the rates of each step, with the warm-up."""

import math
from dataclasses import dataclass

from trainer.config.presets import Hyp, gathered, nominal_batch


@dataclass(frozen=True)
class Rates:
    """Batches to accumulate, learning rates and momentum of one step."""

    accumulate: int
    lr_bias: float
    lr: float
    momentum: float


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule: a function of the step alone, so that a checkpoint needs no state of it.

    `linear` and `cosine` are YOLOv5's, with its warm-up; `one-cycle` (Smith and Topin 2017) needs none.
    """

    hyp: Hyp
    epochs: int
    steps: int  # per epoch
    batch: int  # over all ranks
    kind: str = "linear"

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up: at least 100, or 0 if warmup_epochs is 0."""
        if self.hyp.warmup_epochs <= 0:
            return 0
        return max(round(self.hyp.warmup_epochs * self.steps), 100)

    @property
    def accumulate(self) -> int:
        """Batches per optimizer step after the warm-up."""
        return gathered(self.hyp, self.batch)

    def factor(self, epoch: int) -> float:
        """Return the learning rate of an epoch (from 0) as a fraction of lr0; it falls to lrf."""
        lrf = self.hyp.lrf
        if self.kind == "cosine":
            return (1 - math.cos(math.pi * epoch / self.epochs)) / 2 * (lrf - 1) + 1
        return (1 - epoch / self.epochs) * (1 - lrf) + lrf

    def at(self, step: int) -> Rates:
        """Return the rates of a global step (from 0)."""
        hyp = self.hyp
        if self.kind == "one-cycle":
            return self._one_cycle(step)
        lr = hyp.lr0 * self.factor(step // self.steps)
        if step > self.warmup_steps or not self.warmup_steps:
            return Rates(self.accumulate, lr, lr, hyp.momentum)
        progress = step / self.warmup_steps
        nominal_batches = nominal_batch(hyp, self.batch) / self.batch
        return Rates(
            accumulate=max(1, round(1 + progress * (nominal_batches - 1))),
            lr_bias=hyp.warmup_bias_lr + progress * (lr - hyp.warmup_bias_lr),
            lr=progress * lr,
            momentum=hyp.warmup_momentum + progress * (hyp.momentum - hyp.warmup_momentum),
        )

    def _one_cycle(self, step: int) -> Rates:
        """Rise from lr0 / 25 to lr0 in three tenths of the run, then fall to lr0 / 250 000, along cosines.

        The momentum falls by 0.1 and rises again. The constants are torch's, from OneCycleLR.
        """
        hyp = self.hyp
        last = max(1, self.epochs * self.steps - 1)
        peak = max(0.3 * (last + 1) - 1, 1e-9)
        if step <= peak:
            progress = step / peak
            first_lr, last_lr = 1 / 25, 1.0  # as fractions of lr0
            first_drop, last_drop = 0.0, 0.1  # of the momentum
        else:
            progress = (step - peak) / max(last - peak, 1e-9)
            first_lr, last_lr = 1.0, 1 / 25e4
            first_drop, last_drop = 0.1, 0.0
        share_of_first = (1 + math.cos(math.pi * min(progress, 1.0))) / 2  # falls from 1 to 0
        lr = hyp.lr0 * (last_lr + (first_lr - last_lr) * share_of_first)
        momentum = hyp.momentum - (last_drop + (first_drop - last_drop) * share_of_first)
        return Rates(self.accumulate, lr, lr, momentum)


#: Fewer optimizer steps than these have not taught a network with random weights to find one box (8 images of bccd, 60
#: and 300 steps of yolov5n and yolov8n: mAP50 0.04 and 0.41, 0.01 and 0.76; 2 cores, 2026-11-28).
_FEWEST_STEPS = 200
_ENOUGH_STEPS = 300


def too_few_steps(schedule: Schedule, *, has_weights: bool) -> str:
    """Return a note if a run has too few steps to learn, as with a first data set of a few images; else ""."""
    steps = schedule.epochs * schedule.steps
    warmup = 0 if schedule.kind == "one-cycle" else schedule.warmup_steps
    if not has_weights and steps < _FEWEST_STEPS:
        epochs = math.ceil(_ENOUGH_STEPS / schedule.steps)
        return (
            f"--epochs {schedule.epochs}: {steps} steps ({schedule.steps} per epoch) are too few to train from "
            f"random weights; use --epochs {epochs} or more, or start from trained weights with --weights"
        )
    if steps <= warmup:
        return (
            f"--epochs {schedule.epochs}: the learning rate warms up for {warmup} steps, and the run has only {steps} "
            f"({schedule.steps} per epoch); use more --epochs, or warmup_epochs: 0 in --hyp"
        )
    return ""
