"""Heartbeats of simulated ranks over torch's own store, and memory that real processes share."""

import os
import resource
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.unit.trainer_process import call, ranks
from trainer.distributed import comm, neighbours
from trainer.distributed.neighbours import Neighbours, SharedTexts
from trainer.engine.heartbeats import Heartbeats, texts_of
from trainer.engine.watchdog import STEP, late

BEAT_S = 1.0


class CountingStore:
    """torch's store within a process, which counts the keys of each kind of operation."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.keys: Counter[str] = Counter()

    def set(self, key: str, value: str) -> None:
        self.keys["set"] += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.keys["get"] += 1
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.keys["get by rank 0"] += len(keys)
        return self._store.multi_get(keys)

    def check(self, keys: list[str]) -> bool:
        self.keys["check"] += len(keys)
        return self._store.check(keys)


class World:
    """Ranks on machines, which exchange heartbeats in every interval of a simulated clock."""

    def __init__(self, machines: int, per_machine: int) -> None:
        size = machines * per_machine
        groups = tuple(tuple(range(first, first + per_machine)) for first in range(0, size, per_machine))
        self.store = CountingStore()
        self.now = 0.0
        self.size = size
        self.ranks: list[Heartbeats] = []
        for group in groups:
            shared = Neighbours(groups, SharedTexts.private(texts_of(size)))
            self.ranks += [Heartbeats(rank, shared, self.store, BEAT_S, STEP, self.now) for rank in group]

    def run(self, intervals: int, frozen: Sequence[int] = ()) -> None:
        """Let all ranks but the frozen ones exchange heartbeats."""
        for _ in range(intervals):
            self.now += BEAT_S
            for rank, each in enumerate(self.ranks):
                if rank not in frozen:
                    each.exchange(7, STEP, self.now)

    def causes(self, frozen: Sequence[int] = ()) -> set[str]:
        """Return what the ranks that are not frozen say."""
        alive = [each for rank, each in enumerate(self.ranks) if rank not in frozen]
        return {late(each.all(self.now), self.size, BEAT_S) for each in alive}


def test_512_ranks_read_one_heartbeat_per_machine_in_each_interval() -> None:
    world = World(machines=64, per_machine=8)
    world.run(3)
    assert world.causes() == {f"all ranks are in {STEP} with 7 steps done: the collective itself hangs"}
    world.store.keys.clear()
    world.run(1)
    print(dict(world.store.keys))
    assert world.store.keys == {"set": 64, "get": 63, "get by rank 0": 63}


@pytest.mark.parametrize("frozen", [[1], [2], [3], [4], [4, 5], [2, 5]])
def test_every_rank_names_the_frozen_ranks(frozen: list[int]) -> None:
    """Ranks 2 and 4 send the heartbeats of their machines; when they are frozen, 3 and 5 do."""
    world = World(machines=3, per_machine=2)
    world.run(5)
    world.run(12, frozen)
    which = f"rank {frozen[0]}" if len(frozen) == 1 else f"ranks {frozen[0]}, {frozen[1]}"
    assert world.causes(frozen) == {f"no heartbeat from {which}: frozen, exited or unreachable"}
    world.run(8)  # they continue
    assert world.causes() == {f"all ranks are in {STEP} with 7 steps done: the collective itself hangs"}


def test_without_rank_0_all_heartbeats_are_old() -> None:
    world = World(machines=2, per_machine=2)
    world.run(5)
    world.run(5, [0])
    (cause,) = world.causes([0])
    assert cause.startswith("the store on rank 0's machine does not answer")


def test_a_rank_that_was_suspended_takes_all_ranks_for_alive() -> None:
    world = World(machines=2, per_machine=1)
    world.run(5)
    world.now += 100
    for each in world.ranks:
        each.restart(world.now)
        assert max(beat.silent_s for beat in each.all(world.now).values()) <= 2 * BEAT_S


def test_a_half_written_text_changes_nothing() -> None:
    world = World(machines=1, per_machine=2)
    world.run(3)
    before = world.ranks[1].all(world.now)
    texts = world.ranks[1]._texts
    texts[2 * world.size - 1], texts[2 * world.size] = '[7, "st', "9"
    with pytest.raises(ValueError, match="Unterminated"):
        world.ranks[1].exchange(7, STEP, world.now)
    assert world.ranks[1].all(world.now) == before


def share(*folders: str) -> None:
    """Share memory in this rank's folder; "full" is a folder on a full disk."""
    world = comm.world_of(os.environ)
    comm.join(world, torch.device("cpu"))
    folder = folders[world.rank]
    neighbours._MEMORY = Path("here" if folder == "full" else folder)
    if folder == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    found = neighbours.find(world, 2)
    found.texts[world.rank] = f"rank {world.rank}"
    comm.barrier()
    print(found.machines, [found.texts[number] for number in range(2)], list(neighbours._MEMORY.iterdir()))
    comm.leave()


@pytest.mark.parametrize(
    ("folders", "machines"),
    [
        (("here", "here"), ((0, 1),)),
        (("here", "other"), ((0,), (1,))),  # two containers
        (("full", "full"), ((0,), (1,))),
    ],
)
def test_processes_that_share_a_folder_share_memory_and_leave_no_file(
    folders: tuple[str, str], machines: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    for name in ("here", "other"):
        (tmp_path / name).mkdir()
    for rank, ended in enumerate(call(share, tmp_path, ranks(2), *folders)):
        texts = [
            f"rank {each}" if each in found else "" for found in machines if rank in found for each in (0, 1)
        ]
        assert ended.stdout == f"{machines} {texts} []\n"


def test_a_text_that_does_not_fit_is_refused() -> None:
    texts = SharedTexts.private(2)
    texts[0] = "x" * 64
    assert (texts[0], texts[1]) == ("x" * 64, "")
    with pytest.raises(ValueError, match="65 bytes"):
        texts[0] = "x" * 65
