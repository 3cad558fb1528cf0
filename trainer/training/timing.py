"""Where an epoch's seconds go: waiting for data, copying it to the device, computing, waiting for ranks, validating."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")
SHARES = ("data", "transfer", "compute", "sync", "val")


class Clock:
    """The seconds of one epoch, by what they were spent on; what is not measured is compute.

    DDP sums the gradients bucket by bucket while the backward pass still runs, so most of that costs no time. What
    does is the *exposed* wait: from the moment the last bucket was handed over (this rank has nothing left to
    compute) until backward returns. A communication hook sees that moment. It holds the transfer itself and any
    waiting for slower ranks. On a GPU, where the CPU runs ahead, two events on the stream mark the same moments.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._handed_over: Any = None
        self._pairs: list[tuple[str, Any, Any]] = []  # what two events on the stream are the begin and end of
        self.restart()

    def restart(self) -> None:
        """Begin an epoch."""
        self._start = time.perf_counter()
        self._spent = {share: 0.0 for share in SHARES if share != "compute"}
        self._pairs.clear()

    @contextmanager
    def spending(self, share: str) -> Iterator[None]:
        """Count the seconds of a block as data, transfer, sync or val."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._spent[share] += time.perf_counter() - before

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Count as transfer what a block copies to the device; on a GPU not the host's wait for what runs there yet."""
        if not self._cuda:
            with self.spending("transfer"):
                yield
            return
        begin = _event()
        yield
        self._pairs.append(("transfer", begin, _event()))

    def waiting(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; the time that they take to come counts as data."""
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            self._spent["data"] += time.perf_counter() - before
            if batch is None:
                return
            yield batch

    def watch(self, model: DistributedDataParallel, *, compress: bool = False) -> None:
        """Sum the gradients over the ranks (DDP itself would average them) and note when the last one is ready.

        With `compress` they travel as bf16: half the bytes, and three significant digits of each.
        """
        self._compress = compress
        model.register_comm_hook(None, self._hook)

    def _hook(self, _state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        if bucket.is_last():
            if self._cuda:
                self._handed_over = _event()
            else:
                self._handed_over = time.perf_counter()
        buffer = bucket.buffer()
        sent = buffer.bfloat16() if self._compress else buffer
        work = dist.all_reduce(sent, async_op=True)
        assert work is not None
        future: torch.futures.Future[Any] = work.get_future()
        if not self._compress:
            return future.then(lambda done: done.value()[0])
        return future.then(lambda done: buffer.copy_(done.value()[0]))

    def after_backward(self) -> None:
        """Note that backward has returned, and with it the summed gradients."""
        if self._handed_over is None:
            return
        if self._cuda:
            self._pairs.append(("sync", self._handed_over, _event()))
        else:
            self._spent["sync"] += time.perf_counter() - self._handed_over
        self._handed_over = None

    def seconds(self) -> float:
        """Seconds since the epoch began."""
        return time.perf_counter() - self._start

    def shares(self) -> dict[str, float]:
        """SHARES as fractions of the epoch so far; their sum is 1."""
        if self._pairs:
            torch.cuda.synchronize()
            for share, begin, end in self._pairs:
                self._spent[share] += begin.elapsed_time(end) / 1000
            self._pairs.clear()
        total = max(self.seconds(), 1e-9)
        shares = {k: min(v / total, 1.0) for k, v in self._spent.items()}
        rest = max(0.0, 1 - sum(shares.values()))
        shares["compute"] = rest
        return {k: round(shares[k], 4) for k in SHARES}


def _event() -> Any:
    """This moment of the GPU's current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
