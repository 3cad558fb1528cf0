"""Out of memory: finds, by trying, the batch that would have fitted."""

from __future__ import annotations

import gc
import traceback
from typing import Any

import torch

from trainer.errors import TrainerError
from trainer.parallel import tensors
from trainer.training.run import Run

_SIGNS = ("can't allocate memory", "not enough memory", "out of memory")


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
    fits = images // 2
    if run.settings.parallel not in ("ddp", "dp"):  # a try would need the other ranks
        raise TrainerError(
            f"rank {run.world.rank}: out of memory with {images} pictures of {width} x {height} px on this "
            f"{run.device.type}",
            f"try --batch {max(1, run.settings.batch // 2)}, or a smaller --imgsz",
        ) from None
    while fits and not _tried(run, fits, height, width):
        fits //= 2
    where = f"rank {run.world.rank}: " if run.world.size > 1 else ""
    smaller = "a smaller model" + (" (--cfg yolov5n.yaml)" if run.settings.task == "detect" else "")
    raise TrainerError(
        f"{where}out of memory with {images} pictures of {width} x {height} px on this {run.device.type}",
        f"--batch {fits * run.world.size} fits ({fits} on each rank, tried just now), or a smaller --imgsz"
        if fits
        else f"not even one picture fits: a smaller --imgsz or {smaller}",
    ) from None


def _tried(run: Run, images: int, height: int, width: int) -> bool:
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    run.model.train(not run.settings.sync_bn)  # batch norm over all ranks would wait for the others
    try:
        pictures = torch.rand(images, height, width, 3, device=run.device).permute(0, 3, 1, 2)
        with run.autocast():
            raw = run.model(pictures)
        torch.stack([t.float().sum() for t in tensors(raw)]).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    finally:
        run.model.zero_grad(set_to_none=True)
    return True
