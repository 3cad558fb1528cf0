"""BatchData: what every batch is made of, and how it travels from a worker to the training process."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

FILL = 114  # gray of an image's background


class BatchData:
    """Mixin for batch dataclasses, whose fields are tensors, dicts of tensors, and plain values.

    A training batch has `images`, `targets` (what the loss needs of the labels, by name), `ids` int64 (b,), and
    `global_size`, the images of the step on all ranks together.
    """

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


def empty_images(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a uint8 tensor for a batch's images; a worker allocates it in shared memory, which saves a copy."""
    images = torch.empty(shape, dtype=torch.uint8)
    return images.share_memory_() if get_worker_info() else images  # type: ignore[no-untyped-call]
