"""--parallel ddp and dp: a replica of the model per rank or GPU, and the sum of their gradients.

ddp is torch's DistributedDataParallel; a single process uses the same class. dp is DataParallel.
"""

import contextlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from trainer.config import Settings
from trainer.distributed import comm
from trainer.distributed.strategy import Autocast, Conditions, Evaluate, Strategy
from trainer.distributed.sync_batch_norm import synchronise
from trainer.errors import TrainerError


class Ddp(Strategy):
    """DistributedDataParallel: all-reduce of the gradients overlaps with the backward pass."""

    def setup(self, model: nn.Module, average: nn.Module, conditions: Conditions) -> None:
        """Wrap the model, if the world has other ranks."""
        self.module, self.average, self._conditions = model, average, conditions
        if self._settings.sync_bn and comm.is_distributed():
            synchronise(model, self._device)
        if self._settings.compile:
            # Without `dynamic=False`, a second shape (of a last batch) would make all kernels dynamic.
            dynamic = None if self._settings.multi_scale or self._settings.rect else False
            model.compile(dynamic=dynamic, mode=self._settings.compile_mode)
            # torch logs why a network on a GPU is not captured.
            if self._settings.compile_mode != "default" and self._device.type == "cpu":
                self.summary = f"--compile-mode {self._settings.compile_mode}: without CUDA graphs, which need a GPU"
        self.refresh()

    def refresh(self) -> None:
        """Wrap the model again."""
        self._net: nn.Module = self.module
        if comm.is_distributed():
            known = inspect.signature(DistributedDataParallel.__init__).parameters
            # Batch norm's buffers are averaged before validation, not at every step. torch 2.15 renames the option.
            buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
            # A static graph does not allow no_sync, which gradient accumulation needs.
            options: dict[str, Any] = {buffers: False, "static_graph": self._conditions.always_syncs}
            options["gradient_as_bucket_view"] = True
            devices = [self._device.index] if self._device.type == "cuda" else None
            net = DistributedDataParallel(self.module, device_ids=devices, **options)
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
        images = torch.zeros(2, 3, side, side, device=self._device).to(memory_format=torch.channels_last)
        self._net.train()
        for _ in range(2):  # the second forward pass applies the new order
            with torch.compiler.set_stance("force_eager"):  # no compilation for this shape
                self.step(images, _sum_of_outputs, sync=True)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        for buffer, value in zip(self.module.buffers(), before, strict=True):
            buffer.copy_(value)

    def step(self, images: Tensor, evaluate: Evaluate, sync: bool) -> None:
        """Run forward and backward on this rank's share."""
        skips_sync = comm.is_distributed() and not sync
        if self._settings.compile_mode != "default":  # this imports the compiler
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with self._net.no_sync() if skips_sync else contextlib.nullcontext():  # type: ignore[operator]
            with self._conditions.autocast():
                raw = self._net(images)
            evaluate(raw).backward()  # type: ignore[no-untyped-call]
        if not skips_sync:
            self._conditions.timer.after_backward()


def _sum_of_outputs(raw: Any) -> Tensor:
    return torch.stack([tensor.float().sum() for tensor in tree_leaves(raw)]).sum()


def _sum_gradients(model: DistributedDataParallel, conditions: Conditions, *, compress: bool) -> None:
    """Make the backward pass sum the gradients over the ranks (DDP alone averages them), bucket by bucket.

    With `compress` they are reduced as bf16: half the bytes, three significant digits.
    """

    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        if bucket.is_last():
            conditions.timer.before_last_bucket()
        buffer = bucket.buffer()
        sent = buffer.bfloat16() if compress else buffer
        work = dist.all_reduce(sent, async_op=True)
        assert work is not None
        future: torch.futures.Future[Any] = work.get_future()
        if not compress:
            return future.then(lambda done: done.value()[0])
        return future.then(lambda done: buffer.copy_(done.value()[0]))

    model.register_comm_hook(None, hook)


class Dp(Ddp):
    """DataParallel: every step copies the model to all GPUs and gathers the outputs on the first."""

    unsupported = ("sync_bn", "compile", "grad_compress")

    def __init__(self, settings: Settings, world: comm.World, device: torch.device) -> None:
        if world.size > 1:
            raise TrainerError(
                f"--parallel dp needs a single process, but WORLD_SIZE is {world.size}",
                "start it without torchrun and --ranks, or use --parallel ddp",
            )
        super().__init__(settings, world, device)
        self._gpus = comm.gpu_numbers(settings.device) if device.type == "cuda" else []
        self.summary = f"DataParallel over {len(self._gpus)} GPUs; --parallel ddp with a process per GPU is faster"
        if len(self._gpus) < 2:
            self.summary = f"--parallel dp: training on {device} only; to use several GPUs: --device 0,1"

    def refresh(self) -> None:
        """Wrap the model again."""
        self._net = self.module
        if len(self._gpus) > 1:
            copied = AutocastModule(self.module, self._conditions.autocast)
            self._net = nn.DataParallel(copied, device_ids=self._gpus)


class AutocastModule(nn.Module):
    """A network that enters autocast in its forward pass, because DataParallel's threads lose the dtype."""

    def __init__(self, module: nn.Module, autocast: Autocast) -> None:
        super().__init__()
        self._module, self._autocast = module, autocast

    def forward(self, images: Tensor) -> Any:
        """Return the network's outputs."""
        with self._autocast():
            return self._module(images)
