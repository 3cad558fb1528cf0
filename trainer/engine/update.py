"""Update of the weights: optimizer, loss scaling for fp16, learning rates, and the average of the weights."""

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from trainer.config import Settings
from trainer.distributed import comm
from trainer.engine.ema import Ema
from trainer.engine.optimizer import build_optimizer, set_rates
from trainer.engine.schedule import Rates, Schedule
from trainer.strategies.strategy import Strategy
from trainer.weights.checkpoint import TrainerState

SCALED_GRADIENTS = torch.float16  # its small gradients underflow, so the loss is scaled up
Groups = Sequence[Sequence[str]]  # the parameter names of each group of the optimizer


class UpdateState(TypedDict):
    """What a checkpoint has of the weights and their optimizer: see `TrainerState`."""

    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    updates: int
    optimizer: dict[str, Any]
    scaler: dict[str, Any]


class WeightUpdate:
    """Updates the part of a model that this rank has, and its average."""

    def __init__(
        self,
        settings: Settings,
        schedule: Schedule,
        strategy: Strategy,
        groups: Groups,
        dtype: torch.dtype,
        *,
        in_graphs: bool = False,
    ) -> None:
        """Create the optimizer.

        `groups` are the parameters of the whole model, `dtype` is that of the network's computation. `in_graphs`:
        CUDA graphs make the gradients, and overwrite them in the next step.
        """
        self.schedule = schedule
        self.groups = groups
        self.model = strategy.module
        # Grouped by the layers of the whole model: a traced pipeline stage has lost some layer types.
        local = set(dict(self.model.named_parameters()))
        self.local_groups = [[name for name in group if name in local] for group in groups]
        how = settings.optimizer, settings.hyp, settings.batch
        self.optimizer = build_optimizer(self.model, *how, self.local_groups)
        self.parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        device = self.parameters[0].device
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == SCALED_GRADIENTS)
        self.ema = Ema(self.model, settings.hyp.ema_tau, strategy.average)
        self.grad_norm = torch.zeros((), device=device)  # of the last update, before clipping
        self._clip_norm = settings.hyp.clip_norm
        self._in_graphs = in_graphs
        self._kept: list[Tensor] = []  # gradients of earlier steps that the graphs made
        self.zero_gradients()

    def __call__(self, rates: Rates, strategy: Strategy) -> Tensor | None:
        """Clip the gradients, step the optimizer, and update the average.

        Return the norm that the gradients had, which has to be finite; None with fp16, where the scaler skips
        an update whose gradients are not.
        """
        if self._kept:
            self.keep_gradients()
            for parameter, gradient in zip(self._trained(), self._kept, strict=True):
                parameter.grad = gradient
        set_rates(self.optimizer, rates)
        self.grad_norm = strategy.clip(self.scaler, self.optimizer, self.parameters, self._clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.zero_gradients()
        self.ema.update()
        return None if self.scaler.is_enabled() else self.grad_norm

    def keep_gradients(self) -> None:
        """Add the gradients of a step without an update to those of the steps before.

        Autograd does that itself, unless CUDA graphs own their memory.
        """
        if not self._in_graphs:
            return
        made = [p.grad for p in self._trained() if p.grad is not None]
        if self._kept:
            torch._foreach_add_(self._kept, made)
        else:
            self._kept = [gradient.clone() for gradient in made]
        self.optimizer.zero_grad(set_to_none=True)

    def _trained(self) -> list[Tensor]:
        return [p for p in self.parameters if p.requires_grad]

    def zero_gradients(self) -> None:
        """Remove the gradients. DDP's are views of its buckets, so they stay and become zero."""
        self._kept = []
        self.optimizer.zero_grad(set_to_none=not comm.is_distributed())

    def state_dict(self, strategy: Strategy, names: Sequence[str]) -> UpdateState:
        """Return the state of the whole model, whose tensors have these `names`, and of its optimizer. A collective."""
        return {
            "model": strategy.model_state(self.model, names),
            "ema": strategy.model_state(self.ema.model, names),
            "updates": self.ema.updates,
            "optimizer": strategy.optimizer_state(self.optimizer, self.local_groups, self.groups),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, strategy: Strategy, content: TrainerState) -> None:
        """Restore this rank's part of the state."""
        strategy.load_model(self.model, content["model"])
        strategy.load_model(self.ema.model, content["ema"])
        self.ema.updates = content["updates"]
        strategy.load_optimizer(self.optimizer, self.local_groups, self.groups, content["optimizer"])
        if content["scaler"]:  # empty unless fp16; this device may use another dtype
            self.scaler.load_state_dict(content["scaler"])
        self.zero_gradients()  # those that were accumulated before a non-finite step

    @property
    def models(self) -> tuple[nn.Module, nn.Module]:
        """The model and its average, as far as this rank has them."""
        return self.model, self.ema.model
