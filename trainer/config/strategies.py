"""Strategies of --parallel: what each declares, and where its class is.

A new strategy is a file with a subclass of `Strategy`, and a line in STRATEGIES. No other code names a strategy: what
differs is declared here, or is a method of the class.
"""

import pkgutil
from dataclasses import dataclass
from typing import Any

from trainer.errors import TrainerError


@dataclass(frozen=True, kw_only=True)
class StrategyTraits:
    """What the rest of the trainer needs to know of a strategy without importing torch."""

    path: str  # import path of its subclass of `Strategy`
    about: str  # a sentence for the help of --parallel
    options: tuple[str, ...] = ()  # settings that only this strategy has
    unsupported: tuple[str, ...] = ()  # settings that must have their defaults
    one_process: bool = False  # a single process drives all GPUs of --device
    passes_targets: bool = True  # the network gets the targets of its images in training
    shards_weights: bool = False  # no rank has a whole weight; a single rank has nothing to shard
    splits_layers: bool = False  # the ranks have different layers, so the model must be traceable
    can_compile: bool = False  # torch.compile can compile the network and its loss
    times_communication: bool = False  # the step timer sees it; otherwise it counts as computation
    batch_norm_over: str = ""  # images whose statistics batch norm takes, where --sync-bn does not decide it

    def load(self) -> Any:
        """Import the strategy's class."""
        return pkgutil.resolve_name(self.path)


STRATEGIES = {
    "ddp": StrategyTraits(
        path="trainer.strategies.ddp:Ddp",
        about="each rank has a replica of the model.",
        can_compile=True,
        times_communication=True,
    ),
    "fsdp": StrategyTraits(
        path="trainer.strategies.fsdp:Fsdp",
        about="each rank has a shard of it.",
        unsupported=("unfreeze",),
        shards_weights=True,
    ),
    "pipeline": StrategyTraits(
        path="trainer.strategies.pipeline:Pipeline",
        about="each rank has some of its layers.",
        options=("stages", "micro_batches"),
        passes_targets=False,
        splits_layers=True,
        batch_norm_over="each micro-batch",
    ),
    "dp": StrategyTraits(
        path="trainer.strategies.dp:Dp",
        about="one process uses all GPUs.",
        unsupported=("sync_bn", "grad_compress"),
        one_process=True,
        passes_targets=False,
    ),
}
DEFAULT_STRATEGY = "ddp"
PARALLEL = tuple(sorted(STRATEGIES))


def traits_of(name: str) -> StrategyTraits:
    """Return what the strategy `name` of --parallel declares; raise TrainerError if there is none."""
    if name not in STRATEGIES:
        raise TrainerError(f"--parallel {name}: unknown", f"use one of {', '.join(PARALLEL)}")
    return STRATEGIES[name]
