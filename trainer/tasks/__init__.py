"""Tasks: each combines the data, model, loss and metric of one kind of training."""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.config import ModelCfg, Settings
from trainer.data.batch import TrainBatch
from trainer.data.loading.dataloader import EpochLoader, EvalLoader
from trainer.distributed.comm import LoaderShare
from trainer.losses.criterion import Criterion, LossSums
from trainer.metrics.scores import Metric, Scores

__all__ = ["Evaluation", "Scores", "Task", "open_task"]

# Imported when needed: each has its own large dependencies.
TASKS = {
    "detect": "trainer.tasks.detection:Detection",
    "classify": "trainer.tasks.torchvision_tasks:Classification",
    "segment": "trainer.tasks.torchvision_tasks:Segmentation",
}


class Evaluation(NamedTuple):
    """What a rank found in its batches: the metric, a few images with their predictions, and sums of the loss."""

    metric: Metric
    shown: list[Any]
    losses: LossSums


class Task(ABC):
    """One kind of training. Construction opens and checks the data and the weights file."""

    kind: str  # its name on the command line
    headlines: Mapping[str, str]  # columns in the console output and the events, with their titles
    columns: tuple[str, ...]  # of the scores in results.csv
    terms: tuple[str, ...]  # names of the loss terms, known once the model is built
    names: list[str]  # of the classes
    train_set: Any
    val_set: Any
    left_out: Sequence[Any] = ()  # faulty files that the settings allow to skip
    cfg: ModelCfg  # model configuration, stored in checkpoints
    stride: int  # pixels per cell of the coarsest grid, known once the model is built
    least_side: int  # smallest image side in pixels, known once the model is built
    norm_stride = (
        0  # pixels per value of the coarsest batch norm, known once the model is built; 0: the stride
    )
    backbone = ""  # prefix of the backbone's parameters for `backbone_lr`, known once the model is built
    can_compile = True  # whether the loss has no shapes that depend on values, known once the model is built

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @abstractmethod
    def build(self, say: Callable[[str], None]) -> nn.Module:
        """Return the network with the matching tensors of --weights; the caller's seed makes it equal on all ranks."""

    def fit(self, model: Any) -> str:
        """Fit the untrained model to the data and return a message, "" without one."""
        return ""

    @abstractmethod
    def criterion(self) -> Criterion:
        """Return the loss of the network."""

    @abstractmethod
    def train_loader(self, share: LoaderShare, device: torch.device) -> EpochLoader[TrainBatch]:
        """Return this rank's loader of augmented batches."""

    @abstractmethod
    def val_loader(self, share: LoaderShare) -> EvalLoader[Any]:
        """Return this rank's validation batches."""

    def prepare_targets(self, loader: Any, val_loader: Any, model: Any, *, pads: bool) -> None:
        """Let the loaders make the targets of the loss; with `pads`, training's shapes hardly ever change."""
        return  # the labels are the targets

    def move(self, batch: TrainBatch, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
        """Move a batch to the device: the images as `as_input` takes them, and the targets of the loss."""
        targets = {name: values.to(device, non_blocking=True) for name, values in batch.targets.items()}
        return batch.images.to(device, non_blocking=True), targets

    @abstractmethod
    def metric(self) -> Metric:
        """Return an empty metric."""

    @abstractmethod
    def evaluate(
        self,
        model: Any,
        batches: Iterable[Any],
        device: torch.device,
        dtype: torch.dtype,
        criterion: Criterion | None = None,
    ) -> Evaluation:
        """Evaluate on this rank's batches; with a `criterion` that `validates`, on the device, add up its sums."""


def open_task(settings: Settings) -> Task:
    """Return the task of the settings with its data opened and checked. Raise TrainerError for unusable data."""
    task: Task = pkgutil.resolve_name(TASKS[settings.task])(settings)
    return task
