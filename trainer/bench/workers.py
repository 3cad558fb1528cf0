"""How many loading processes pay: the loader alone and the training with 0, 1, 2, ... of them, on the user's data."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from trainer.bench.measure import Effort, Measured, measure
from trainer.bench.tables import gigabytes, markdown
from trainer.config import Settings
from trainer.errors import TrainerError

Rounds = Mapping[int, Sequence[Measured]]
LADDER = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CLOSE = 0.04  # rates that differ by less are alike: of these, the fewest workers are taken
IDLE = 0.03  # share of a step spent waiting for data, below which more workers have nothing to bring


def next_to_try(rates: Mapping[int, float], waiting: float, most: int) -> int | None:
    """The next number of workers, None where more do not pay.

    `rates` are the pictures per second of those tried, in their order; `waiting` is the share of its time that the
    last of them waited for data, which is all that more workers could save.
    """
    tried = list(rates)
    if not tried:
        return LADDER[0]
    before, last_two = [rates[k] for k in tried[:-2]], [rates[k] for k in tried[-2:]]
    if waiting < IDLE or (before and max(last_two) < max(before) * (1 + CLOSE)):
        return None
    return next((k for k in LADDER if tried[-1] < k <= most), None)


def choose(rates: Mapping[int, float]) -> int:
    """The fewest workers whose rate is within CLOSE of the best: each costs memory and takes a core."""
    return min(k for k, rate in rates.items() if rate >= max(rates.values()) * (1 - CLOSE))


def try_workers(
    settings: Settings, ranks: int, rounds: int, effort: Effort, most: int
) -> Iterator[tuple[int, Measured | TrainerError | None]]:
    """Measure 0, 1, 2, ... workers of each rank until more do not pay, then those again in later rounds.

    Yields each number before (with None) and after it was measured, or with the error that it ended with: no more are
    tried then. The first number's error is raised.
    """
    rates: dict[int, float] = {}
    waiting = 1.0
    for number in range(rounds):
        again = list(rates)
        while True:
            workers = next_to_try(rates, waiting, most) if not number else again.pop(0) if again else None
            if workers is None:
                break
            yield workers, None
            try:
                measured = measure(replace(settings, workers=workers, val=False), ranks, effort)
            except TrainerError as error:
                if not rates:
                    raise
                yield workers, error
                if number:
                    return
                break
            if not number:
                rates[workers], waiting = measured.images_per_s, measured.shares["data"]
            yield workers, measured


def rates_of(found: Rounds) -> dict[int, float]:
    """Pictures per second of each number of workers: of none, the median; of the others in proportion to it.

    A proportion is the median of those of each round, as the speed of a machine drifts.
    """
    first = next(iter(found))
    base = statistics.median(m.images_per_s for m in found[first])
    return {
        workers: base
        * statistics.median(m.images_per_s / b.images_per_s for m, b in zip(ms, found[first], strict=False))
        for workers, ms in found.items()
    }


def table_of(found: Rounds) -> str:
    """A row for each number of workers."""
    rates = rates_of(found)
    rows = []
    for workers, rounds in found.items():
        loader = statistics.median(m.loader_images_per_s or 0.0 for m in rounds)
        waiting = statistics.median(m.shares["data"] for m in rounds)
        memory = max(m.host_bytes for m in rounds)
        rows.append([str(workers), f"{loader:.1f}", f"{rates[workers]:.1f}", f"{waiting:.0%}", gigabytes(memory)])
    return markdown(["workers", "loader alone img/s", "training img/s", "waiting for data", "host GB"], rows)
