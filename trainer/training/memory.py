"""Out of memory: finds, by trying, the batch that would have fitted."""

from __future__ import annotations

import gc
import traceback
from typing import Any

import torch

from trainer.errors import TrainerError
from trainer.parallel import tensors
from trainer.parallel.ddp import Ddp
from trainer.training.run import Run

_SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "status_alloc_failed",
)  # the last: CUDA's libraries


def is_short(error: RuntimeError) -> bool:
    """Whether torch means that there is not enough memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error).lower() for sign in _SIGNS)


def explain(error: RuntimeError, run: Run, batch: Any) -> None:
    """Raise a TrainerError that names a batch that fits, if `error` is about memory; else do nothing."""
    if not is_short(error):
        return
    traceback.clear_frames(error.__traceback__)  # they hold the tensors of the step that failed
    run.optimizer.zero_grad(set_to_none=True)
    images, height, width = batch.images.shape[:3]
    where = f"rank {run.world.rank}: " if run.world.size > 1 else ""
    what = f"{where}out of memory with {images} pictures of {width} x {height} px on this {run.device.type}"
    untried = f"try --batch {max(1, run.settings.batch // 2)}, or a smaller --imgsz"
    if not isinstance(run.mode, Ddp):  # a try would need the other ranks
        raise TrainerError(what, untried) from None
    run.mode.unwrap()
    devices = run.mode.devices
    fits = -(-images // devices) // 2  # of what each GPU gets
    try:
        while fits and not _fits(run, fits, height, width):
            fits //= 2
    except (RuntimeError, ValueError):  # not for want of memory: nothing was found out
        raise TrainerError(what, untried) from None
    smaller = "a smaller model" + (" (--cfg yolov5n.yaml)" if run.settings.task == "detect" else "")
    each = "GPU" if devices > 1 else "rank"
    raise TrainerError(
        what,
        f"--batch {fits * devices * run.world.size} fits ({fits} on each {each}, tried just now), or a smaller --imgsz"
        if fits
        else f"not even one picture fits: a smaller --imgsz or {smaller}",
    ) from None


def _fits(run: Run, images: int, height: int, width: int) -> bool:
    """Whether there is memory for so many pictures, forward and backward on this rank alone; raises what else fails."""
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    run.model.train(not run.settings.sync_bn)  # batch norm over all ranks would wait for the others
    try:
        pictures = torch.rand(images, height, width, 3, device=run.device).permute(0, 3, 1, 2)
        with run.autocast():
            raw = run.model(pictures)
        torch.stack([t.float().sum() for t in tensors(raw)]).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if not is_short(error):
            raise
        traceback.clear_frames(error.__traceback__)
        return False
    finally:
        run.model.zero_grad(set_to_none=True)
    return True
