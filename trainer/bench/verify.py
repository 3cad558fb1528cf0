"""Verification: compares losses and gradients of the first steps on several numbers of ranks."""

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.bench.measure import steps_of
from trainer.bench.processes import request_of, run_here
from trainer.config import DEFAULT_STRATEGY, Settings, traits_of
from trainer.distributed import comm
from trainer.engine.events import Events
from trainer.engine.trainer import Trainer
from trainer.errors import TrainerError

# Relative. An untrained network amplifies rounding errors of gradients about a thousandfold per step. In float64 the
# difference after three steps is 1e-5 at most; a wrong sum differs by 1e-2 or more.
TOLERANCES = {"float64": 1e-4, "fp32": 1e-2}
Step = dict[str, Tensor]  # loss () and gradient (parameters,), float64, summed over the ranks


@dataclass(frozen=True)
class Difference:
    """Difference of a step from the same step on the first number of ranks."""

    ranks: int
    step: int  # from 1
    loss: float
    gradient_norm: float  # before clipping, which would hide a wrong scale
    loss_off: float  # relative
    gradient_off: float  # norm of the difference over the norm
    greatest: float  # largest difference of one element of the gradient


def verify(
    settings: Settings, counts: Sequence[int], steps: int, *, wide: bool, threads: int = 1
) -> list[Difference]:
    """Train `steps` steps on each number of ranks, on this machine, and compare with the first number.

    With `wide` the network computes in float64 and the loss in float32. Raise TrainerError if a rank does.
    """
    if steps < 1:
        raise TrainerError(f"--steps must be 1 or more, not {steps}")
    are_in_range = all(1 <= count <= settings.batch for count in counts)
    if not counts or not are_in_range:
        raise TrainerError(
            f"--ranks {','.join(map(str, counts))}: each must be from 1 to --batch {settings.batch}",
            "--batch counts the images of all ranks together",
        )
    runs = []
    for count in counts:
        own = dataclasses.replace(settings, device=comm.devices_of(settings.device, count))
        if count == 1:  # a pipeline of one stage; and there is nothing to shard
            parallel = DEFAULT_STRATEGY if traits_of(own.parallel).shards_weights else own.parallel
            own = dataclasses.replace(own, stages=0, parallel=parallel)
        request = request_of("verify", own, threads, steps=steps, wide=wide)
        runs.append(run_here(request, count))
    differences = []
    for count, run in zip(counts, runs, strict=True):
        for step, (mine, first) in enumerate(zip(run, runs[0], strict=True), start=1):
            differences.append(compare(count, step, mine, first))
    return differences


def compare(ranks: int, step: int, mine: Step, first: Step) -> Difference:
    """Return the differences of one step; infinite if a value is NaN."""
    norm = float(first["gradient"].norm())
    off = mine["gradient"] - first["gradient"]

    def relative(difference: float, whole: float) -> float:
        if not difference and not whole:
            return 0.0
        share = abs(difference) / whole if whole else math.inf
        return math.inf if math.isnan(share) else share

    return Difference(
        ranks=ranks,
        step=step,
        loss=float(mine["loss"]),
        gradient_norm=float(mine["gradient"].norm()),
        loss_off=relative(float(mine["loss"] - first["loss"]), abs(float(first["loss"]))),
        gradient_off=relative(float(off.norm()), norm),
        greatest=float(off.abs().max()),
    )


def agree(differences: Sequence[Difference], tolerance: float) -> bool:
    """Return whether all differences are within the tolerance."""
    return all(d.loss_off <= tolerance and d.gradient_off <= tolerance for d in differences)


def record(settings: Settings, steps: int, wide: bool, threads: int) -> list[Step]:
    """Train the first steps on this rank, and return their losses and gradients."""
    world = comm.world_of(os.environ)
    device = comm.pick_device(settings.device, world)
    torch.set_num_threads(threads)
    training = Trainer(settings, world, device, Events({}))
    if wide:
        training.model.double()
        training.model.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(), *inputs[1:]))
    comm.join(world, device)
    training.task.criterion().without_noise()
    training.start()
    gradients: list[Tensor] = []

    def record_gradient(*_: object) -> None:
        # Reduced over the ranks; clipping is undone.
        grads = {name: p.grad for name, p in training.local_model.named_parameters() if p.grad is not None}
        whole = training.strategy.gather(grads)
        names = [name for group in training.update.groups for name in group]
        flat = torch.cat([whole[name].flatten() for name in names if name in whole])
        clipped_by = (training.update.grad_norm.double().cpu() / settings.hyp.clip_norm).clamp(min=1)
        gradients.append(flat.double().cpu() * clipped_by)

    training.update.optimizer.register_step_pre_hook(record_gradient)
    training.local_model.train()
    recorded: list[Step] = []
    for batch in itertools.islice(steps_of(training), steps):
        training.step(batch)
        terms = training.meter.terms.double()
        comm.wait(comm.start_sum(terms))
        recorded.append({"loss": terms.sum().cpu(), "gradient": gradients.pop()})
    return recorded
