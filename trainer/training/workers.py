"""How many loading processes pay: what to try next, which number to take, and where it is remembered."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from trainer import dist
from trainer.data.dataset import fingerprint_of
from trainer.data.shared_memory import PREFETCH
from trainer.data.stream import await_forkserver
from trainer.training.run import Run
from trainer.weights import checkpoint

LADDER = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CLOSE = 0.04  # rates that differ by less are alike: of these, the fewest workers are taken
IDLE = 0.03  # share of a step spent waiting for data, below which more workers have nothing to bring
NEAR = 0.25  # numbers whose first rate is within this share of the best are tried again, in turns
TURNS = 4  # of each such number; an even count, as every second turn is in the other order
SECONDS = 2.0  # of training in each turn
FEWEST, MOST = 5, 200  # steps that these seconds may come to
KEPT = 200  # answers that are remembered


def most_workers(local_size: int) -> int:
    """The most that are tried on each of `local_size` ranks of this machine: as many as there are cores, or 1."""
    return max(1, dist.usable_cores() // local_size)


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


def together(turns: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """One rate for each number of the last turn, from those of all turns.

    A machine can be half as fast a minute later, so what is compared is each rate's share of its own turn's mean; the
    median over the turns leaves out the one in which something else ran.
    """
    numbers = list(turns[-1])
    means = [statistics.fmean(turn[k] for k in numbers) for turn in turns]
    shares = {k: statistics.median(turn[k] / mean for turn, mean in zip(turns, means, strict=True)) for k in numbers}
    return {k: share * statistics.median(means) for k, share in shares.items()}


def key_of(run: Run) -> str:
    """What a number of workers is remembered for: data, machine, device, ranks, and what makes a step."""
    s = run.settings
    machine = f"{platform.node()} {dist.usable_cores()} cores {torch.get_num_threads()} threads {run.device.type}"
    ranks = f"{run.world.local_size} of {run.world.size} ranks"
    step = (
        f"{s.task} {s.cfg} {s.weights} {s.imgsz} px batch {s.batch} {str(run.dtype).removeprefix('torch.')} {s.cache} "
        f"{s.parallel} {s.stages} rect {s.rect} sides {s.multi_scale} mosaic {s.hyp.mosaic} mixup {s.hyp.mixup}"
    )
    return f"{fingerprint_of(run.task.train_set)} | {machine} | {ranks} | {step}"


def _path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clusterctl" / "workers.json"


def _all() -> dict[str, Any]:
    """What is remembered; nothing where the file is not there, or not as `remember` writes it."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # the last: a user without a home
        content = json.loads(_path().read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}


def recall(key: str) -> int | None:
    """The number of workers that was found best for a key."""
    found = _all().get(key)
    number = found.get("workers") if isinstance(found, dict) else None
    return number if isinstance(number, int) and 0 <= number <= LADDER[-1] else None


def remember(key: str, rates: Mapping[int, float]) -> bool:
    """Keep what was found for later runs of this user; whether it could be written."""
    content = {k: v for k, v in _all().items() if k != key}
    content[key] = {"workers": choose(rates), "images_per_s": {str(k): round(v, 2) for k, v in rates.items()}}
    newest = dict(list(content.items())[-KEPT:])
    try:
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write_bytes(path, json.dumps(newest, indent=1).encode())
    except (OSError, RuntimeError):
        return False
    return True


_Step: TypeAlias = tuple[int, float, float]  # its pictures, seconds of waiting for them, and seconds in all


class Finder:
    """`--workers auto`: tries 0, 1, 2, ... in the first steps of a training, and goes on with what paid.

    Those that are not clearly worse are tried again, in turns: the speed of the machine itself drifts.
    These are steps like any other, because no number of workers changes a batch. All ranks change theirs at the same
    step, to what rank 0 has measured; on a GPU a step's time is that of handing it over, true over several of them.
    """

    def __init__(self, run: Run) -> None:
        """Begin with what is remembered for this training, if anything is. A collective."""
        self._run, self._key = run, key_of(run)
        known = dist.broadcast(recall(self._key))
        self._search = self._find() if known is None else None
        if self._search:
            await_forkserver()  # which would slow down the first number that is tried
            next(self._search)
        else:
            run.use_workers(known)
            run.screen.say(f"--workers auto: {known}, as found before (trainer bench workers finds it anew)")

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of an epoch as they come; in between, the number of workers may change. A collective."""
        while self._search:
            begun = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            waited = time.perf_counter() - begun
            yield batch
            with contextlib.suppress(StopIteration):
                self._search.send((batch.global_size, waited, time.perf_counter() - begun))
                continue
            self._search = None
        yield from batches

    def _find(self) -> Generator[None, _Step, None]:
        """Takes what each step took; ends when it has found."""
        run, rates, waiting = self._run, dict[int, float](), 1.0
        most = most_workers(run.world.local_size)
        while (workers := dist.broadcast(next_to_try(rates, waiting, most))) is not None:
            rates[workers], waiting = yield from self._try(workers)
        near = [k for k, rate in rates.items() if rate >= max(rates.values()) * (1 - NEAR)]
        near, turns = dist.broadcast(near), [rates]
        while len(near) > 1 and len(turns) < TURNS:
            near.reverse()  # 0 1, 1 0, 0 1, ...: a machine that slows down steadily favours none
            turn = {}
            for workers in near:
                turn[workers], _ = yield from self._try(workers)
            turns.append(turn)
        rates |= together(turns)
        best = dist.broadcast(choose(rates))
        run.use_workers(best)
        if run.world.rank == 0:
            kept = ", and remembered" if remember(self._key, rates) else ""
            tried = ", ".join(f"{rate:.1f} with {workers}" for workers, rate in rates.items())
            run.screen.say(f"--workers auto: {tried} pictures per second; {best} is taken{kept}")

    def _try(self, workers: int) -> Generator[None, _Step, tuple[float, float]]:
        """Train with so many for a while; returns pictures per second and the share of the time waited for them."""
        self._run.use_workers(workers)
        for _ in range(3 + PREFETCH * workers):  # they start, and what they make ahead is used up
            yield
        images, waited, seconds, taken = 0, 0.0, 0.0, 0
        wanted = pilot = max(FEWEST, 2 * workers)
        while taken < wanted:
            step = yield
            images, waited, seconds, taken = images + step[0], waited + step[1], seconds + step[2], taken + 1
            if taken == pilot:
                wanted = dist.broadcast(max(pilot, min(int(pilot * SECONDS / seconds), MOST)))
        return images / seconds, waited / seconds
