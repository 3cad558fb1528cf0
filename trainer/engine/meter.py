"""Loss meter: the loss terms of each step and of the epoch, over all ranks, without waiting for a GPU."""

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor

from trainer.distributed import comm
from trainer.engine.state import NotFinite

NONE = -1  # no step
_REQUESTS = 2  # values of a sum over the ranks: ranks with a stop signal, ranks whose checkpoint is due


class MeterState(TypedDict):
    """What a checkpoint needs of a rank's meter."""

    pending: Tensor  # float64 (t,): the last step's terms, which are not reduced yet
    bad: int  # the epoch's first step with a non-finite value, or NONE


class LossMeter:
    """Loss terms of a training.

    In each step all ranks add up the terms of the step before and the requests to stop or save, in one collective that
    overlaps with the forward pass. So the terms of a step are known on all ranks with the next step.
    """

    def __init__(self, terms: int, rank: int, device: torch.device) -> None:
        """Start a meter of `terms` loss terms."""
        self.rank = rank
        self.device = device
        self.terms = torch.zeros(terms, device=device)  # of this rank in the last step; the step sets it
        self.last_step = NONE  # the step of `terms`
        # Of all ranks, in `reduced_step`.
        self.reduced = torch.zeros(terms, dtype=torch.float64, device=device)
        self.reduced_step = NONE
        self.sums = torch.zeros_like(self.reduced)  # of the epoch's reduced steps
        # This epoch's first step with a non-finite value.
        self._first_bad = torch.full((), NONE, device=device)
        self._work: Any = None
        self._account: Callable[..., None] = _account
        self._read: Callable[[], list[float]] | None = None

    def start_sum(self, stop: bool, save: bool) -> None:
        """Start to add up the last step's terms and the requests of all ranks. A collective."""
        self.reduced = self.terms.double()
        self.reduced_step = self.last_step
        if comm.is_distributed():
            requests = torch.tensor([float(stop), float(save)], dtype=torch.float64)
            self.reduced = torch.cat((self.reduced, send(requests, self.device)))
            self._work = comm.start_sum(self.reduced)

    def finish_sum(self) -> None:
        """Wait for the sum, on a GPU without the host. A second call does nothing."""
        if self._work is None:
            return
        comm.wait(self._work)
        self._work = None
        self.reduced, requests = self.reduced[:-_REQUESTS], self.reduced[-_REQUESTS:]
        self._read = comm.copy_to_host(requests)  # before the backward pass, for which a reader need not wait

    def requests(self, stop: bool, save: bool) -> tuple[bool, bool]:
        """Return whether any rank has to stop, and whether any has to save; the arguments are this rank's."""
        if self._read is None:
            return stop, save
        stops, saves = self._read()
        return bool(stops), bool(saves)

    def end_step(self, number: int, grad_norm: Tensor | None) -> None:
        """Account for step `number` (from 0 over the run); a `grad_norm` has to be finite."""
        self.last_step = number
        norm = self.sums[:0] if grad_norm is None else grad_norm
        self._account(self.sums, self._first_bad, self.reduced, self.reduced_step, norm, number)

    def compile(self) -> None:
        """Compile what `end_step` computes to one kernel."""
        self._account = torch.compile(_account)

    def run_eagerly(self) -> None:
        """Undo `compile`."""
        self._account = _account

    def try_out(self) -> None:
        """Compute what `end_step` does, on copies; raise what the compiler raises."""
        copies = [each.clone() for each in (self.sums, self._first_bad, self.sums)]
        self._account(*copies, NONE, torch.zeros((), device=self.device), 0)

    def check_finite(self) -> None:
        """Raise NotFinite on all ranks if a gradient, or a loss before the last step, is not finite."""
        step = int(self._first_bad)
        if step != NONE:
            raise NotFinite(step)

    def reduce_last(self) -> Tensor:
        """Return the terms of the epoch's last step, float64 (t,), of all ranks. A collective.

        `sums` does not include them, so that a checkpoint before the validation is like one at any other step.
        """
        last = self.terms.double()
        comm.wait(comm.start_sum(last))
        _record(self._first_bad, last, self.last_step)
        self.check_finite()
        return last

    def begin_epoch(self) -> None:
        """Start a new epoch."""
        self.sums.zero_()
        self.terms = torch.zeros_like(self.terms)
        self._first_bad.fill_(NONE)

    def state_of_rank(self) -> MeterState:
        """Return what a checkpoint keeps of this rank: the terms that are not reduced yet, and the first bad step."""
        _record(self._first_bad, self.terms, self.last_step)
        return {"pending": self.terms.double().cpu(), "bad": int(self._first_bad)}

    def load(self, sums: Tensor, pending: Tensor, last_step: int) -> None:
        """Restore the sums of the epoch, and the terms of this rank in `last_step`."""
        self.sums.copy_(sums)
        self.terms = pending.to(self.terms)
        self.last_step = last_step
        self._first_bad.fill_(NONE)


def _account(
    sums: Tensor, first_bad: Tensor, reduced: Tensor, reduced_step: int, grad_norm: Tensor, number: int
) -> None:
    """Add the reduced terms to the epoch's sums, and record the steps of what is not finite."""
    sums += reduced
    _record(first_bad, reduced, reduced_step)
    _record(first_bad, grad_norm, number)


def _record(first_bad: Tensor, values: Tensor, step: int) -> None:
    """Record the first step with a non-finite value, without synchronizing a GPU (`where` would)."""
    is_bad = (values.sum() * 0).isnan()
    first_bad.masked_fill_(is_bad & (first_bad == NONE), step)


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy values of the host to a device. The host does not wait for a GPU."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
