"""Shows that N ranks train as one does: losses and gradients of the first steps on several numbers of ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer import contract, dist, parallel
from trainer.config import Hyp, Settings
from trainer.errors import TrainerError
from trainer.events import Events
from trainer.ranks import Line, error_of, run_ranks
from trainer.training.optim import CLIP_NORM
from trainer.training.run import Run

# Relative. An untrained network enlarges rounding: a gradient's about a thousandfold, and again with each step that
# follows from it. What is left in float64 after three steps is 1e-5 at most; a wrong sum is off by 1e-2 or more.
TOLERANCES = {"float64": 1e-4, "fp32": 1e-2}
Step = dict[str, Tensor]  # loss () and gradient (parameters,), float64, of all ranks together


@dataclass(frozen=True)
class Difference:
    """How far a step is from the same step of the first number of ranks."""

    ranks: int
    step: int  # from 1
    loss: float
    gradient_norm: float  # before it is clipped, which would hide a wrong scale
    loss_off: float  # relative
    gradient_off: float  # norm of the difference over the norm
    greatest: float  # difference of a single value of the gradient


def verify(settings: Settings, counts: Sequence[int], steps: int, *, wide: bool, threads: int = 1) -> list[Difference]:
    """Train the first `steps` steps on each number of ranks, on this machine, and compare with the first number.

    Everything but the number of ranks is as `settings` says; `wide` lets the network compute in float64, and only the
    loss in float32. Raises TrainerError where a rank does.
    """
    if steps < 1:
        raise TrainerError(f"--steps is {steps}, it must be 1 or more")
    if not counts or any(not 1 <= count <= settings.batch for count in counts):
        raise TrainerError(
            f"--ranks {','.join(map(str, counts))}: each must be from 1 to --batch {settings.batch}",
            "--batch counts the pictures of all ranks together",
        )
    runs = []
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        for count in counts:
            asked = Path(folder) / f"ranks{count}.json"
            own = dataclasses.replace(settings, device=dist.devices_of(settings.device, count))
            content = dataclasses.asdict(parallel.settings_for(own, count))
            asked.write_text(json.dumps({**content, "steps": steps, "wide": wide}), encoding="utf-8")
            runs.append(_run(asked, count, threads))
    return [
        compare(count, step, mine, first)
        for count, run in zip(counts, runs, strict=True)
        for step, (mine, first) in enumerate(zip(run, runs[0], strict=True), start=1)
    ]


def compare(ranks: int, step: int, mine: Step, first: Step) -> Difference:
    """The differences of one step; infinite where a value is missing or no number."""
    norm = float(first["gradient"].norm())
    off = mine["gradient"] - first["gradient"]

    def relative(difference: float, whole: float) -> float:
        share = abs(difference) / whole if whole else float("inf") if difference else 0.0
        return share if share == share else float("inf")

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
    """Whether all are within rounding."""
    return all(d.loss_off <= tolerance and d.gradient_off <= tolerance for d in differences)


def _run(asked: Path, count: int, threads: int) -> list[Step]:
    path = asked.with_suffix(".pt")
    said: list[Line] = []
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CLUSTER_")}
    # Events tell a rank's error. One number of threads throughout: it decides the order of sums.
    environment |= {contract.JOB_ID: "verify", "OMP_NUM_THREADS": str(threads)}
    failed = run_ranks(["verify", "--record", f"{asked},{path}"], count, environment, said.append)
    if failed:
        raise error_of(failed, said)
    return torch.load(path, weights_only=True)  # type: ignore[no-any-return]


def record(asked: Path, path: Path) -> None:
    """What one rank does: the real training's first steps; rank 0 writes their losses and gradients."""
    content: dict[str, Any] = json.loads(asked.read_text(encoding="utf-8"))
    steps, wide = content.pop("steps"), content.pop("wide")
    settings = settings_from(content)
    world = dist.world_of(os.environ)
    device = dist.pick_device(settings.device, world)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    run = Run(settings, world, device, Events({}))
    if wide:
        run.model.double()
        run.model.register_forward_pre_hook(lambda _, images: (images[0].double(),))
    dist.join(world, device)
    run.start()
    taken: list[Tensor] = []

    def take(*_: object) -> None:
        # What the optimizer is about to use: reduced over the ranks, and here as it was before it was clipped.
        grads = {name: p.grad for name, p in run.net.named_parameters() if p.grad is not None}
        whole = run.mode.whole(grads)
        flat = [whole[name].flatten() for group in run.groups for name in group if name in whole]
        unclipped = (run.norm.double().cpu() / CLIP_NORM).clamp(min=1)
        taken.append(torch.cat(flat).double().cpu() * unclipped)

    run.optimizer.register_step_pre_hook(take)
    run.net.train()
    found: list[Step] = []
    while len(found) < steps:
        for batch in run.train.epoch(run.at.epoch):
            run.step(batch)
            terms = run.pending.clone()
            dist.wait(dist.start_sum(terms))
            found.append({"loss": terms.sum().cpu(), "gradient": taken.pop()})
            if len(found) == steps:
                break
        run.begin_epoch()
    if world.rank == 0:
        torch.save(found, path)
    dist.leave()


def settings_from(content: dict[str, Any]) -> Settings:
    """Settings that went through JSON."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
    values["hyp"] = Hyp(**content["hyp"])
    return Settings(**values)
