"""--parallel ddp: a replica of the model per rank, and the sum of their gradients; a single process uses it too."""

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.data.batch import Targets
from trainer.distributed import comm
from trainer.strategies.network_with_loss import NetworkWithLoss
from trainer.strategies.strategy import Conditions, Strategy
from trainer.strategies.sync_batch_norm import synchronise


class Ddp(Strategy):
    """DistributedDataParallel: all-reduce of the gradients overlaps with the backward pass."""

    def setup(self, whole: NetworkWithLoss, average: nn.Module, conditions: Conditions) -> None:
        """Wrap network and loss, if the world has other ranks."""
        self.module = whole.network
        self.average = average
        self._conditions = conditions
        self._whole = whole
        if self._settings.sync_bn and comm.is_distributed():
            synchronise(self.module, self._device)
        self.refresh()

    def refresh(self) -> None:
        """Wrap network and loss again."""
        self._net: nn.Module = self._whole
        if comm.is_distributed():
            known = inspect.signature(DistributedDataParallel.__init__).parameters
            # Batch norm's buffers are averaged before validation, not at every step. torch 2.15 renames the option.
            buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
            # A static graph does not allow no_sync, which gradient accumulation needs.
            options: dict[str, Any] = {buffers: False, "static_graph": self._conditions.always_syncs}
            options["gradient_as_bucket_view"] = True
            devices = [self._device.index] if self._device.type == "cuda" else None
            net = DistributedDataParallel(self._whole, device_ids=devices, **options)
            _sum_gradients(net, self._conditions, compress=self._settings.grad_compress == "bf16")
            self._net = net
            self._fix_bucket_order()

    def _fix_bucket_order(self) -> None:
        """Run two steps on zeros, because DDP reorders its gradient buckets after the first backward pass.

        With three or more ranks, the order of the buckets decides the order of the sums. A resumed training
        must add in the same order as the training that wrote the checkpoint.
        """
        before = [b.clone() for b in self.module.buffers()]
        side = self._conditions.min_side
        images = torch.zeros(2, side, side, 3, dtype=torch.uint8, device=self._device)
        self._net.train()
        with (
            self._whole.without_loss(),
            torch.compiler.set_stance("force_eager"),
        ):  # no compilation for this shape
            for _ in range(2):  # the second forward pass applies the new order
                total, _ = self.forward(images, {})
                total.backward()  # type: ignore[no-untyped-call]
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        for buffer, value in zip(self.module.buffers(), before, strict=True):
            buffer.copy_(value)

    def forward(self, images: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Return the sums and counts of this rank's share."""
        return self._net(images, targets)  # type: ignore[no-any-return]

    def accumulating(self) -> AbstractContextManager[None]:
        """Keep DDP from summing the gradients in the backward pass."""
        if not comm.is_distributed():
            return contextlib.nullcontext()
        return self._net.no_sync()  # type: ignore[operator,no-any-return]

    def end_backward(self) -> None:
        """Let the timer know that the last bucket is summed."""
        self._conditions.timer.after_backward()


def _sum_gradients(model: DistributedDataParallel, conditions: Conditions, *, compress: bool) -> None:
    """Make the backward pass sum the gradients over the ranks (DDP alone averages them), bucket by bucket.

    With `compress` they are reduced as bf16: half the bytes, three significant digits.
    """

    is_copied_back = dist.get_backend() == "gloo" and next(model.parameters()).device.type == "cuda"

    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        if bucket.is_last():
            conditions.timer.before_last_bucket()
        buffer = bucket.buffer()
        sent = buffer.bfloat16() if compress else buffer
        work = dist.all_reduce(sent, async_op=True)
        assert work is not None
        future: torch.futures.Future[Any] = work.get_future()

        def take(done: torch.futures.Future[Any]) -> Tensor:
            if is_copied_back:  # gloo's future does not wait for the copy to the GPU
                work.synchronize()
            return buffer.copy_(done.value()[0]) if compress else done.value()[0]  # type: ignore[no-any-return]

        return future.then(take)

    model.register_comm_hook(None, hook)
