"""Out-of-memory errors of torch and Python."""

from __future__ import annotations

from typing import Any

import torch

from trainer.errors import TrainerError
from trainer.training.run import Run

HINT = "use a smaller --batch, --imgsz or --cfg, or --precision bf16"
_SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "status_alloc_failed",
)  # the last: CUDA's libraries


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether an allocation failed, in host memory or on a GPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(sign in str(error).lower() for sign in _SIGNS)


def step_error(run: Run, batch: Any) -> TrainerError:
    """Describe a step of this rank that ran out of memory."""
    images, height, width = batch.images.shape[:3]
    rank = f"rank {run.world.rank}: " if run.world.size > 1 else ""
    return TrainerError(f"{rank}out of memory on {run.device} with {images} images of {width} x {height} px", HINT)
