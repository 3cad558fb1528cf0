"""What a training with the package needs from this trainer: its rank, folder, checkpoints, events and signals."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.distributed import comm
from trainer.engine.events import Events
from trainer.engine.signals import StopSignals
from trainer.engine.watchdog import Watchdog
from trainer.ultralytics.copies import Copies

_FINAL = "yolo/final validation"  # in the store: the batches that rank 0 has validated
_FINISHED = "finished"
_POLL_S = 0.5
#: Of collectives: the package scans its images inside of a barrier. A lost rank ends the others much earlier, see
#: trainer/engine/watchdog.py.
TIMEOUT = timedelta(hours=1)


@dataclass
class Session:
    """A run's parts. `folder` and `copies` are None without a launcher; `data` is the value of `data=`."""

    world: comm.World
    device: torch.device
    events: Events
    data: str
    folder: Path | None = None
    copies: Copies | None = None
    store: Any = None
    signals: StopSignals = field(default_factory=StopSignals)
    watchdog: Watchdog = field(init=False)
    is_final: bool = False  # the final validation has begun

    def __post_init__(self) -> None:
        self._all: Any = None
        self._firsts: Any = None
        if self.world.size > 1:
            # Over gloo, because the values are on the host: votes would synchronize a GPU.
            self._all = dist.new_group(backend="gloo", timeout=TIMEOUT)
            firsts = [rank for rank, local in enumerate(comm.all_gather(self.world.local_rank)) if local == 0]
            self._firsts = dist.new_group(firsts, backend="gloo", timeout=TIMEOUT)
        self._vote: tuple[Any, torch.Tensor] | None = None
        self._validated = 0

    def agree_to_stop(self, *, now: bool) -> int:
        """Return, on all ranks alike, the number of a stop signal that one of them has received, or 0. A collective.

        With `now`, this includes the signals received so far. Otherwise it is the answer to the previous call, whose
        exchange has overlapped with the batch in between.
        """
        if self._all is None:
            return self.signals.received
        found = self._answer()
        if not found:
            received = torch.tensor([float(self.signals.received)])
            self._vote = (
                dist.all_reduce(received, dist.ReduceOp.MAX, group=self._all, async_op=True),
                received,
            )
        return found or (self._answer() if now else 0)

    def _answer(self) -> int:
        """Wait for the exchange that has begun; return the greatest number of a signal, or 0."""
        if self._vote is None:
            return 0
        (work, received), self._vote = self._vote, None
        work.wait()
        return int(received)

    @contextlib.contextmanager
    def first_machine_first(self) -> Iterator[None]:
        """Let the first rank of rank 0's machine run the block before those of other machines.

        If they share a disk, one machine writes what the others then find. Only the first rank of each machine may
        enter.
        """
        if self._firsts is not None and self.world.local_rank == 0 and self.world.rank:
            dist.barrier(group=self._firsts)
        yield
        if self._firsts is not None and self.world.rank == 0:
            dist.barrier(group=self._firsts)

    def note_validated(self) -> None:
        """Record a batch of a validation; in the final one, let the waiting ranks know."""
        self._validated += 1
        self.watchdog.progress()
        if self.is_final and self.store is not None:
            self.store.set(_FINAL, str(self._validated))

    @contextlib.contextmanager
    def final_validation(self) -> Iterator[bool]:
        """Yield True on rank 0, which validates alone; other ranks wait for it after the block. A collective.

        They wait as long as rank 0 makes progress, so a process group's timeout does not limit its duration.
        """
        self.is_final = True
        yield self.world.rank == 0
        if self.store is None:  # a single rank, or the store cannot be reached
            comm.barrier()
            return
        if self.world.rank == 0:
            self.store.set(_FINAL, _FINISHED)
        seen = ""
        while seen != _FINISHED:
            if self.store.check([_FINAL]) and (text := self.store.get(_FINAL).decode()) != seen:
                seen = text
                self.watchdog.progress()
            else:
                time.sleep(_POLL_S)
