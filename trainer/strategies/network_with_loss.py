"""NetworkWithLoss: what every strategy runs, and torch.compile compiles."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainer.data.batch import Targets
from trainer.losses.criterion import Criterion, ImageSize, Outputs, mean_terms
from trainer.models.precision import as_input, size_of

#: Inductor's options on a GPU. What the backward pass's reduction and its next kernel share is computed in both. By default
#: inductor would store it in float32: batch norm reads five tensors, and SiLU's gradient has many operations.
GPU_OPTIONS: dict[str, Any] = {"realize_reads_threshold": 8, "realize_opcount_threshold": 100}


class NetworkWithLoss(nn.Module):
    """A network and its loss as one module: what torch.compile compiles, and what DDP wraps.

    `autocast` makes the context of the network's precision; the loss is computed in float32.
    """

    _compute: Callable[[Tensor, Targets], tuple[Tensor, Tensor]]
    _loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    inputs = staticmethod(as_input)

    def __init__(
        self, network: nn.Module, criterion: Criterion, autocast: Callable[[], AbstractContextManager[Any]]
    ):
        super().__init__()
        self.network = network
        self.criterion = criterion
        self.autocast = autocast
        self.run_eagerly()

    def outputs(self, images: Tensor, targets: Targets) -> Outputs:
        """Return the network's raw outputs for images as `as_input` takes them."""
        with self.autocast():
            return self.criterion.outputs_of(self.network, self.inputs(images), targets)

    def forward(self, images: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Return the sums and counts of this rank's images: see `Criterion`."""
        if self._has_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return self._compute(images, targets)

    def _eager(self, images: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        return self.sums(self.outputs(images, targets), targets, images)

    def sums(self, outputs: Outputs, targets: Targets, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the criterion's sums and counts of the network's raw outputs for these images."""
        sums, counts = self.criterion(outputs, targets, size_of(images))
        return sums, counts

    def loss(self, sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the terms (t,) float32, and the loss with gradients, from sums (t, d) and the counts of all ranks."""
        return self._loss(sums, counts)

    def _eager_loss(self, sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        terms = mean_terms(sums, self.criterion.divisors(counts), self.criterion.gains)
        return terms.detach(), terms.sum() * self.criterion.weight(counts[0].float())

    def compile_with(self, mode: str, dynamic: bool | None, device: torch.device) -> None:
        """Compile network and loss as one function, and the division by the counts as another, on their next call."""
        has_graphs = mode == "reduce-overhead"
        if device.type == "cuda":  # torch takes a mode or options: this is what the mode stands for
            options = {"triton.cudagraphs": has_graphs, **GPU_OPTIONS}
            self._compute = torch.compile(self._eager, options=options, dynamic=dynamic)
        else:
            self._compute = torch.compile(self._eager, mode=mode, dynamic=dynamic)
        self._loss = torch.compile(self._eager_loss)
        self._has_graphs = has_graphs

    def run_eagerly(self) -> None:
        """Undo `compile_with`."""
        self._compute = self._eager
        self._loss = self._eager_loss
        self._has_graphs = False

    @contextlib.contextmanager
    def without_loss(self) -> Iterator[None]:
        """Take the sum of all outputs for the loss within the context: it needs no targets."""
        criterion = self.criterion
        self.criterion = SumOfOutputs((1.0,))
        try:
            yield
        finally:
            self.criterion = criterion


class SumOfOutputs(Criterion):
    """The sum of all outputs."""

    def forward(self, outputs: Outputs, targets: Targets, size: ImageSize, /) -> tuple[Tensor, Tensor]:
        """Return the sum, without counts."""
        total = torch.stack([tensor.float().sum() for tensor in tree_leaves(outputs)]).sum()
        return total, total.detach()
