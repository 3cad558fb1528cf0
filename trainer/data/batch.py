"""Batches: what the dataloaders give to a step and to its loss, and how they travel from a worker to the trainer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

FILL = 114  # gray of an image's background
# (n, 6): image of the batch, class, cx, cy, w, h as fractions of its sides.
BoxLabels = npt.NDArray[np.float32]
# What a loss needs of a batch's labels, by name; what makes them documents the shapes.
Targets = Mapping[str, Tensor]
Rows = Callable[[str, int], int]  # the name of a list and the entries that it needs -> the rows to give it


def exact(_: str, needed: int) -> int:
    """Give every list the rows that it needs: the `Rows` of a step whose shapes may change."""
    return needed


class Assign(Protocol):
    """Makes the targets of a detector's loss, in a dataloader worker."""

    def __call__(
        self, labels: BoxLabels, images: int, height: int, width: int, rows: Rows = exact
    ) -> dict[str, Tensor]:
        """Return the targets of `images` images of height x width px; `rows` may make their shapes independent of n."""


class BatchData:
    """Mixin for batch dataclasses, whose fields are tensors, dicts of tensors, and plain values."""

    def pin_memory(self: Any) -> Any:
        """Return the same batch in pinned memory."""
        return self._each(lambda value: value.pin_memory())

    def _each(self: Any, change: Callable[[Any], Any]) -> Any:
        """Return the same batch with every tensor changed."""
        values: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, (torch.Tensor, BatchData)):
                values[name] = change(value)
            elif isinstance(value, dict):
                values[name] = {key: change(tensor) for key, tensor in value.items()}
        return replace(self, **values)

    def __reduce__(self: Any) -> tuple[Any, ...]:
        # torch sends each tensor as a file; pickling the values is faster for tensors that are not in shared memory.
        def sent(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: sent(each) for key, each in value.items()}
            is_private = isinstance(value, torch.Tensor) and not value.is_shared()  # type: ignore[no-untyped-call]
            return value.numpy() if is_private else value

        return _batch_of, (type(self), [sent(getattr(self, each.name)) for each in fields(self)])


def _batch_of(kind: Any, values: list[Any]) -> Any:
    def received(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: received(each) for key, each in value.items()}
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    return kind(*map(received, values))


@dataclass
class TrainBatch(BatchData):
    """One rank's part of a global training batch of any task."""

    images: Tensor  # uint8 (b, h, w, 3), RGB
    targets: dict[str, Tensor]  # see `Targets`
    ids: Tensor  # int64 (b,): the numbers of the images in the dataset
    global_size: int  # images of this step on all ranks together


def empty_images(shape: tuple[int, ...]) -> Tensor:
    """Return a uint8 tensor for a batch's images; a worker allocates it in shared memory, which saves a copy."""
    images = torch.empty(shape, dtype=torch.uint8)
    return images.share_memory_() if get_worker_info() else images  # type: ignore[no-untyped-call]
