"""Step timer: an epoch's time in loading, transfer, computation, synchronization and validation."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
SHARES = ("data", "transfer", "compute", "sync", "val")


class StepTimer:
    """Seconds of one epoch by activity; all time that is not measured counts as compute.

    DDP reduces gradients bucket by bucket during the backward pass, which hides most of the communication. `sync` is
    the exposed part: from the last bucket's hand-over until backward returns, including the wait for slower ranks.
    Ddp's communication hook marks the hand-over. On a GPU, two events on the stream mark the same moments.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last_bucket: Any = None
        self._pairs: list[tuple[str, Any, Any]] = []  # activity, begin and end events on the stream
        self.restart()

    def restart(self) -> None:
        """Start an epoch."""
        self._start = time.perf_counter()
        self.spent = {share: 0.0 for share in SHARES if share != "compute"}
        self._pairs.clear()

    @contextmanager
    def spending(self, share: str) -> Iterator[None]:
        """Count the seconds of a block as data, transfer, sync or val."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self.spent[share] += time.perf_counter() - before

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Count a block's copies to the device as transfer; on a GPU, the copies alone without the host's wait."""
        if not self._cuda:
            with self.spending("transfer"):
                yield
            return
        begin = _event()
        yield
        self._pairs.append(("transfer", begin, _event()))

    def waiting(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches, and count the wait for each as data."""
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            self.spent["data"] += time.perf_counter() - before
            if batch is None:
                return
            yield batch

    def before_last_bucket(self) -> None:
        """Mark the moment when the last gradients of a step are ready to be summed."""
        self._last_bucket = _event() if self._cuda else time.perf_counter()

    def after_backward(self) -> None:
        """Mark the end of backward, after which the gradients are summed."""
        if self._last_bucket is None:
            return
        if self._cuda:
            self._pairs.append(("sync", self._last_bucket, _event()))
        else:
            self.spent["sync"] += time.perf_counter() - self._last_bucket
        self._last_bucket = None

    def seconds(self) -> float:
        """Return the seconds since the epoch started."""
        return time.perf_counter() - self._start

    def shares(self) -> dict[str, float]:
        """Return SHARES as fractions of the epoch so far; their sum is 1."""
        if self._pairs:
            torch.cuda.synchronize()
            for share, begin, end in self._pairs:
                self.spent[share] += begin.elapsed_time(end) / 1000
            self._pairs.clear()
        total = max(self.seconds(), 1e-9)
        shares = {k: min(v / total, 1.0) for k, v in self.spent.items()}
        shares["compute"] = max(0.0, 1 - sum(shares.values()))
        return {k: round(shares[k], 4) for k in SHARES}


def _event() -> Any:
    """Record an event on the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
