"""A training step: the way of a batch from the dataloader to the weights.

A dataloader worker has painted the images (or packed them for the painter on the GPU), and has turned the labels into
the targets of the loss (data/loading/detection_loader.py). `TrainStep` runs the network and its loss, divides by what
all ranks counted, differentiates, and updates the weights (update.py). How the gradients of the ranks are added up is
the strategy's business (strategies/). The host never waits for a GPU here, except to learn that another rank
has to stop.
"""

import contextlib

from torch import Tensor

from trainer.data.batch import Targets, TrainBatch
from trainer.distributed import comm
from trainer.engine.meter import LossMeter
from trainer.engine.state import StepResult, TrainState, seed_generators
from trainer.engine.timing import StepTimer
from trainer.engine.update import WeightUpdate
from trainer.strategies.network_with_loss import NetworkWithLoss
from trainer.strategies.strategy import Strategy
from trainer.tasks import Task


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
        self._task = task
        self._strategy = strategy
        self._whole = whole
        self._seed = seed
        self._update = update
        self._meter = meter
        self._timer = timer

    def __call__(
        self,
        batch: TrainBatch,
        state: TrainState,
        number: int,
        *,
        is_last: bool,
        stop: bool = False,
        save: bool = False,
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

        self.differentiate(images, targets, sync=updates)

        self._finish_sum()  # on ranks that compute no loss
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

    def differentiate(self, images: Tensor, targets: Targets, *, sync: bool) -> None:
        """Run forward and backward. With `sync`, the gradients are summed over the ranks."""
        strategy = self._strategy
        if strategy.schedule:  # a pipeline, which asks for the loss between its passes
            strategy.schedule(images, targets, self._loss_of, sync=sync)
            return
        with contextlib.nullcontext() if sync else strategy.accumulating():
            sums, counts = strategy.forward(images, targets)
            self._loss_of(sums, counts).backward()  # type: ignore[no-untyped-call]
        if sync:
            strategy.end_backward()

    def _loss_of(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return what is differentiated: this rank's share in the loss of all ranks.

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
