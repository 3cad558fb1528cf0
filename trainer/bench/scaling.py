"""Scaling benchmark: points of batch size, ranks, precision and strategy, measured in interleaved rounds."""

import itertools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from trainer import contract
from trainer.bench.measure import Measurement
from trainer.bench.processes import NoMemory
from trainer.config import DEFAULT_STRATEGY, PARALLEL, PRECISIONS, STRATEGIES, Settings
from trainer.data.progress import bar
from trainer.distributed.comm import devices_of
from trainer.errors import TrainerError

P = TypeVar("P")
Outcome = Measurement | TrainerError
# Strategies whose communication counts as computation.
UNTIMED = tuple(name for name in PARALLEL if not STRATEGIES[name].times_communication)


@dataclass(frozen=True)
class Point:
    """A configuration; `batch` is per rank, or with `strong` over all ranks."""

    batch: int
    ranks: int
    precision: str
    strong: bool = False
    parallel: str = DEFAULT_STRATEGY

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.parallel}, {ranks}, batch {self.step_batch}, {self.precision}"

    @property
    def step_batch(self) -> int:
        """Images per step over all ranks."""
        return self.batch if self.strong else self.batch * self.ranks

    @property
    def series(self) -> tuple[int, str]:
        """Key of the points whose rates are compared with each other."""
        return self.batch, self.precision


@dataclass(frozen=True)
class Row:
    """A point with its median round. `gain` is relative to the fewest ranks, the median over the rounds."""

    point: Point
    measured: Measurement | None
    failure: str = ""
    gain: float | None = None
    efficiency: float | None = None  # gain relative to linear scaling


def points_of(
    batches: Sequence[int],
    ranks: Sequence[int],
    precisions: Sequence[str],
    strong: bool,
    strategies: Sequence[str],
) -> list[Point]:
    """Return all combinations, those of a series in sequence; a single rank has one point for all strategies."""
    for option, values in (("--batch", batches), ("--ranks", ranks)):
        are_distinct = len(set(values)) == len(values)
        if not values or min(values) < 1 or not are_distinct:
            raise TrainerError(f"{option} {','.join(map(str, values))}: expected distinct numbers, 1 or more")
    if strong and min(batches) < max(ranks):
        raise TrainerError(
            f"--batch {min(batches)} with --strong: fewer images per step than the {max(ranks)} ranks",
            "with --strong, --batch counts the images of all ranks together",
        )
    _check_known("--precision", precisions, PRECISIONS)
    _check_known("--parallel", strategies, PARALLEL)
    points = []
    for precision, batch, count in itertools.product(precisions, sorted(batches), sorted(ranks)):
        names = strategies if count > 1 else [DEFAULT_STRATEGY]
        for strategy in names:
            points.append(Point(batch, count, precision, strong, strategy))
    return points


def _check_known(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise TrainerError(f"{option} {name}: unknown", f"use {', '.join(known)}, separated by commas")


def settings_at(settings: Settings, point: Point) -> Settings:
    """Return `settings` with the values of the point, and defaults for the options that only other strategies have."""
    defaults: dict[str, Any] = {}
    for name, traits in STRATEGIES.items():
        if name != point.parallel:
            defaults |= {option: getattr(Settings, option) for option in traits.options}
    return replace(
        settings,
        **defaults,
        parallel=point.parallel,
        batch=point.step_batch,
        precision=point.precision,
        device=devices_of(settings.device, point.ranks, point.parallel),
    )


def measure_rounds(
    points: Sequence[P], rounds: int, measure_one: Callable[[P], Measurement], unit: str = ""
) -> tuple[dict[P, list[Outcome]], bool]:
    """Measure every point once per round, with a progress bar; return the outcomes, and False after Ctrl-C.

    Later rounds skip a failed point. An error of the first measurement is raised, because every point would fail;
    except NoMemory. `unit` follows a point in the bar and in the log.
    """
    outcomes: dict[P, list[Outcome]] = {}
    with bar(len(points) * rounds) as move:
        try:
            for point in [*points] * rounds:
                of_point = outcomes.setdefault(point, [])
                has_failed = any(isinstance(outcome, TrainerError) for outcome in of_point)
                if not has_failed:
                    title = f"{point}{unit}"
                    move(description=title)
                    is_first = not any(outcomes.values())
                    of_point.append(_outcome_of(measure_one, point, title, is_first))
                move(advance=1)
        except KeyboardInterrupt:
            return {point: measured for point, measured in outcomes.items() if measured}, False
    return outcomes, True


def _outcome_of(measure_one: Callable[[P], Measurement], point: P, title: str, is_first: bool) -> Outcome:
    """Measure a point; in a job of the launcher, log the outcome."""
    outcome: Outcome
    try:
        outcome = measure_one(point)
        text = f"{outcome.train_images_per_s:.1f} images/s"
    except TrainerError as error:
        if is_first and not isinstance(error, NoMemory):
            raise
        outcome = error
        text = error.message
    if contract.JOB_ID in os.environ:
        print(f"{title}: {text}", flush=True)
    return outcome


def rows_of(outcomes: Mapping[Point, Sequence[Outcome]]) -> list[Row]:
    """Return a row for each point, in their order."""
    rows: list[Row] = []
    for point, of_point in outcomes.items():
        failure = next((error.message for error in of_point if isinstance(error, TrainerError)), "")
        if failure:
            rows.append(Row(point, None, failure))
            continue
        rounds = [outcome for outcome in of_point if isinstance(outcome, Measurement)]
        series = [other for other in outcomes if other.series == point.series]
        base = min(series, key=lambda other: other.ranks)
        ratios = []
        for mine, first in zip(rounds, outcomes[base], strict=False):
            if isinstance(first, Measurement):
                ratios.append(mine.train_images_per_s / first.train_images_per_s)
        gain = statistics.median(ratios) if ratios else None
        efficiency = None if gain is None else gain * base.ranks / point.ranks
        by_rate = sorted(rounds, key=lambda measured: measured.train_images_per_s)
        middle = by_rate[(len(by_rate) - 1) // 2]
        rows.append(Row(point, middle, "", gain, efficiency))
    return rows
