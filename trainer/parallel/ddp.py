"""--parallel ddp: every rank has the whole model and a share of the pictures; also what a process does by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer import dist
from trainer.config import Settings
from trainer.models.sync import synchronise
from trainer.parallel.mode import Conditions, Evaluate, tensors


class Ddp:
    """torch's DistributedDataParallel: the ranks' gradients are summed while the backward pass still runs."""

    stages = 1
    sees_outputs = True
    seeing: dist.Group | None = None
    module: nn.Module
    average: nn.Module
    said = ""
    rest: Mapping[str, Tensor] = {}

    def __init__(self, settings: Settings, world: dist.World, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self.share = world.rank, world.size

    def place(self, model: nn.Module, average: nn.Module, conditions: Conditions) -> None:
        """Wrap the model, where there are other ranks."""
        self.module, self.average, self._conditions = model, average, conditions
        if self._settings.sync_bn and dist.together():
            synchronise(model, self._device)
        if self._settings.compile:
            model.compile()
        self.refresh()

    def refresh(self) -> None:
        """Wrap the model anew."""
        self._net: nn.Module = self.module
        if dist.together():
            # no_sync, which accumulation needs, does not go with a static graph.
            net = dist.wrap(self.module, self._device, static=self._conditions.always_moves)
            self._conditions.clock.watch(net, compress=self._settings.grad_compress == "bf16")
            self._net = net
            self._settle_buckets()

    def _settle_buckets(self) -> None:
        """Run the network once for nothing: DDP orders its gradient buckets anew after the first backward pass.

        From three ranks on, the order of the buckets decides in which order the ranks' gradients are added up. After
        this, a run that goes on from a checkpoint adds them up as the run did that wrote it.
        """
        before = [b.clone() for b in self.module.buffers()]
        side = self._conditions.least_side
        images = torch.zeros(2, 3, side, side, device=self._device).to(memory_format=torch.channels_last)
        self._net.train()
        for _ in range(2):  # the new order is put in place by the second forward pass
            self.step(images, lambda raw: torch.stack([t.float().sum() for t in tensors(raw)]).sum(), moves=True)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        for buffer, value in zip(self.module.buffers(), before, strict=True):
            buffer.copy_(value)

    def step(self, images: Tensor, evaluate: Evaluate, moves: bool) -> None:
        """Forward and backward on this rank's share."""
        quiet = dist.together() and not moves
        with self._net.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
            with self._conditions.autocast():
                raw = self._net(images)
            evaluate(raw).backward()  # type: ignore[no-untyped-call]
        if not quiet:
            self._conditions.clock.after_backward()

    def clip(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], most: float
    ) -> Tensor:
        """Every rank has all gradients: nothing to be asked of the others."""
        scaler.unscale_(optimizer)
        return nn.utils.clip_grad_norm_(parameters, most)

    def average_(self, tensors: list[Tensor]) -> None:
        """Average over all ranks."""
        dist.average_(tensors)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are."""
        return dict(tensors)

    def take(self, own: Tensor, whole: Tensor) -> None:
        """Copy all of it."""
        own.copy_(whole)

    def complete(self) -> nn.Module:
        """The average as it is."""
        return self.average
