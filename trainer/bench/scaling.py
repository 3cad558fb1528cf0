"""What more ranks bring: batch sizes x ranks x precisions, in interleaved rounds, and the gain of each point."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.bench.measure import Effort, Measured, NoMemory, measure
from trainer.config import PARALLEL, PRECISIONS, Settings
from trainer.dist import devices_of
from trainer.errors import TrainerError

Outcome = Measured | TrainerError
UNTIMED = ("dp", "fsdp", "pipeline")  # modes whose exchange nobody times by itself: it counts as computing


@dataclass(frozen=True)
class Point:
    """What is varied; `batch` counts the pictures of a rank, or with `strong` those of all ranks together."""

    batch: int
    ranks: int
    precision: str
    strong: bool = False
    parallel: str = "ddp"

    @property
    def step_batch(self) -> int:
        """Pictures of a step on all ranks together."""
        return self.batch if self.strong else self.batch * self.ranks

    @property
    def alone(self) -> tuple[int, str]:
        """What points have in common whose rates are compared: they differ by ranks and by mode."""
        return self.batch, self.precision


@dataclass(frozen=True)
class Row:
    """A point with its middle round; `gain` is over the fewest ranks, the median of the ratios of each round."""

    point: Point
    measured: Measured | None
    failure: str = ""
    gain: float | None = None
    efficiency: float | None = None  # the gain, as a share of what the ranks would bring at best


def points_of(
    batches: Sequence[int],
    ranks: Sequence[int],
    precisions: Sequence[str],
    strong: bool,
    modes: Sequence[str] = ("ddp",),
) -> list[Point]:
    """All combinations, those that are compared with each other side by side; raises TrainerError for a bad value.

    A single rank has no other rank to share its work with: it comes once, whatever the modes.
    """
    for option, values in (("--batch", batches), ("--ranks", ranks)):
        if not values or min(values) < 1 or len(set(values)) < len(values):
            raise TrainerError(f"{option} {','.join(map(str, values))}: each must be 1 or more, and given once")
    if strong and min(batches) < max(ranks):
        raise TrainerError(
            f"--batch {min(batches)} --strong: fewer pictures in a step than ranks, {max(ranks)}",
            "with --strong, --batch counts the pictures of all ranks together",
        )
    for option, names, known in (("--precision", precisions, PRECISIONS), ("--parallel", modes, PARALLEL)):
        for name in names:
            if name not in known:
                raise TrainerError(f"{option} {name}: unknown", f"use {', '.join(known)}, with commas between them")
    return [
        Point(b, r, p, strong, mode)
        for p in precisions
        for b in sorted(batches)
        for r in sorted(ranks)
        for mode in (modes if r > 1 else ("ddp",))
    ]


def scale(
    settings: Settings, points: Sequence[Point], rounds: int, effort: Effort
) -> Iterator[tuple[Point, Outcome | None]]:
    """Measure every point once a round; yields each before (with None) and after it was measured.

    One that fails is told once and left out of later rounds. An error before anything could be measured is raised,
    except a lack of memory: the input is bad, and every other point would say the same.
    """
    left, succeeded = list(points), False
    for _ in range(rounds):
        for point in list(left):
            yield point, None
            try:
                asked = replace(
                    in_mode(settings, point.parallel),
                    batch=point.step_batch,
                    precision=point.precision,
                    device=devices_of(settings.device, point.ranks, point.parallel),
                )
                measured = measure(asked, 1 if point.parallel == "dp" else point.ranks, effort)
            except TrainerError as error:
                if not succeeded and not isinstance(error, NoMemory):
                    raise
                left.remove(point)
                yield point, error
            else:
                succeeded = True
                yield point, measured


def in_mode(settings: Settings, mode: str) -> Settings:
    """The same training by another --parallel; what only a pipeline is told is left out of the others."""
    stages, micro_batches = (settings.stages, settings.micro_batches) if mode == "pipeline" else (0, 0)
    return replace(settings, parallel=mode, stages=stages, micro_batches=micro_batches)


def rows_of(outcomes: Mapping[Point, Sequence[Outcome]]) -> list[Row]:
    """A row for each point, in their order."""
    rows: list[Row] = []
    bases: dict[tuple[int, str], Point] = {}
    for point in outcomes:
        if point.alone not in bases or point.ranks < bases[point.alone].ranks:
            bases[point.alone] = point
    for point, found in outcomes.items():
        failure = next((error.message for error in found if isinstance(error, TrainerError)), "")
        rounds = [m for m in found if isinstance(m, Measured)]
        if failure or not rounds:
            rows.append(Row(point, None, failure))
            continue
        base = bases[point.alone]
        pairs = [
            (mine, first)
            for mine, first in zip(found, outcomes[base], strict=False)
            if isinstance(mine, Measured) and isinstance(first, Measured)
        ]
        gain = statistics.median(a.images_per_s / b.images_per_s for a, b in pairs) if pairs else None
        middle = sorted(rounds, key=lambda m: m.images_per_s)[(len(rounds) - 1) // 2]
        rows.append(Row(point, middle, "", gain, gain and gain * base.ranks / point.ranks))
    return rows
