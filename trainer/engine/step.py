"""A training step: the way of a batch from the dataloader to the weights.

A dataloader worker has painted the images (or packed them for the painter on the GPU), and has turned the labels into
the targets of the loss (data/detection_loader.py). `TrainStep` runs the network and its loss, divides by what
all ranks counted, differentiates, and updates the weights (update.py). How the gradients of the ranks are added up is
the strategy's business (distributed/). The host never waits for a GPU here, except to learn that another rank
has to stop.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainer.distributed import comm
from trainer.distributed.strategy import Strategy
from trainer.engine.meter import LossMeter
from trainer.engine.state import StepResult, TrainState, seed_generators
from trainer.engine.timing import StepTimer
from trainer.engine.update import WeightUpdate
from trainer.losses import Criterion, Targets
from trainer.models.precision import as_input
from trainer.tasks import Task


class NetworkWithLoss(nn.Module):
    """A network and its loss as one module: what torch.compile compiles, and what DDP wraps.

    `autocast` makes the context of the network's precision; the loss is computed in float32.
    """

    _compute: Callable[[Tensor, Targets], tuple[Tensor, Tensor]]
    _loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    inputs = staticmethod(as_input)

    def __init__(self, network: nn.Module, criterion: Criterion, autocast: Callable[[], AbstractContextManager[Any]]):
        super().__init__()
        self.network, self.criterion, self.autocast = network, criterion, autocast
        self.run_eagerly()

    def outputs(self, images: Tensor, targets: Targets) -> Any:
        """Return the network's raw outputs for images as `as_input` takes them."""
        with self.autocast():
            return self.criterion.outputs_of(self.network, self.inputs(images), targets)

    def forward(self, images: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Return the sums and counts of this rank's images: see `Criterion`."""
        if self._has_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return self._compute(images, targets)

    def _eager(self, images: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        sums, counts = self.criterion(self.outputs(images, targets), targets)
        return sums, counts

    def loss(self, sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the terms (t,) float32, and the loss with gradients, from sums (t, d) and the counts of all ranks."""
        return self._loss(sums, counts)

    def _eager_loss(self, sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        terms = mean_terms(sums, self.criterion.divisors(counts), self.criterion.gains)
        return terms.detach(), terms.sum() * self.criterion.weight(counts[0].float())

    def compile_with(self, mode: str, dynamic: bool | None) -> None:
        """Compile network and loss as one function, and the division by the counts as another, on their next call."""
        self._compute = torch.compile(self._eager, mode=mode, dynamic=dynamic)
        self._loss = torch.compile(self._eager_loss)
        self._has_graphs = mode == "reduce-overhead"

    def run_eagerly(self) -> None:
        """Undo `compile_with`."""
        self._compute, self._loss, self._has_graphs = self._eager, self._eager_loss, False

    @contextlib.contextmanager
    def without_loss(self) -> Iterator[None]:
        """Take the sum of all outputs for the loss within the context: it needs no targets."""
        criterion, self.criterion = self.criterion, SumOfOutputs((1.0,))
        try:
            yield
        finally:
            self.criterion = criterion


class SumOfOutputs(Criterion):
    """The sum of all outputs."""

    def forward(self, outputs: Any, targets: Targets, /) -> tuple[Tensor, Tensor]:
        """Return the sum, without counts."""
        total = torch.stack([tensor.float().sum() for tensor in tree_leaves(outputs)]).sum()
        return total, total.detach()


class TrainStep:
    """Trains on one batch after the other."""

    def __init__(
        self,
        task: Task,
        strategy: Strategy,
        whole: NetworkWithLoss,
        update: WeightUpdate,
        meter: LossMeter,
        timer: StepTimer,
        seed: int,
    ) -> None:
        self._task, self._strategy, self._whole, self._seed = task, strategy, whole, seed
        self._update, self._meter, self._timer = update, meter, timer

    def __call__(
        self, batch: Any, state: TrainState, number: int, *, is_last: bool, stop: bool = False, save: bool = False
    ) -> StepResult:
        """Train on a batch, in step `number` of the run (from 0), and advance `state`.

        The weights are updated when enough batches are accumulated, and always in an epoch's last step, because a
        checkpoint holds no accumulated gradients. `stop` and `save` are this rank's requests; the result has those
        of any rank.
        """
        rates = self._update.schedule.at(number)
        updates = is_last or number - state.last_move >= rates.accumulate
        seed_generators(self._seed, number, self._meter.rank)
        with self._timer.copying():
            images, targets = self._task.move(batch, self._meter.device)
        self._meter.start_sum(stop, save)  # overlaps with the forward pass

        self._strategy.step(images, targets, self._loss_of, sync=updates)

        self._finish_sum()
        grad_norm = None
        if updates:
            grad_norm = self._update(rates, self._strategy)
            state.last_move = number
        else:
            self._update.keep_gradients()
        self._meter.end_step(number, grad_norm)
        state.images += batch.global_size
        state.step += 1
        return StepResult(*self._meter.requests(stop, save), updates)

    def _loss_of(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return what the strategy differentiates: this rank's share in the loss of all ranks.

        `sums` (t, d) and `counts` (d,) are a criterion's. The gradients of the ranks are added up, not averaged.
        """
        work = comm.start_sum(counts, self._strategy.replica_group)
        self._finish_sum()
        with self._timer.spending("sync"):
            comm.wait(work)
        self._meter.terms, loss = self._whole.loss(sums, counts)
        scaled: Tensor = self._update.scaler.scale(loss)
        return scaled

    def _finish_sum(self) -> None:
        """Take the sums over the ranks, before the backward pass where this rank computes the loss."""
        with self._timer.spending("sync"):
            self._meter.finish_sum()


def mean_terms(sums: Tensor, counts: Tensor, gains: Tensor) -> Tensor:
    """Return the loss terms (t,) float32 from sums (t, d), counts (d,) to divide by, and gains (t,)."""
    return (sums / counts.clamp(min=1).float()).sum(1) * gains
