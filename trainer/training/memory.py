"""Out of memory: finds, by trying, the batch that would have fitted."""

from __future__ import annotations

import gc
import traceback

import torch

from trainer.data import Batch
from trainer.errors import TrainerError
from trainer.training.run import Run

_SIGNS = ("can't allocate memory", "not enough memory", "out of memory")


def explain(error: RuntimeError, run: Run, batch: Batch) -> None:
    """Raise a TrainerError that names a batch that fits, if `error` is about memory; else do nothing."""
    if not isinstance(error, torch.OutOfMemoryError) and not any(sign in str(error).lower() for sign in _SIGNS):
        return
    traceback.clear_frames(error.__traceback__)  # they hold the tensors of the step that failed
    run.optimizer.zero_grad(set_to_none=True)
    images, height, width = batch.images.shape[:3]
    fits = images // 2
    while fits and not _tried(run, fits, height, width):
        fits //= 2
    where = f"rank {run.world.rank}: " if run.world.size > 1 else ""
    raise TrainerError(
        f"{where}out of memory with {images} pictures of {width} x {height} px on this {run.device.type}",
        f"--batch {fits * run.world.size} fits ({fits} on each rank, tried just now), or a smaller --imgsz"
        if fits
        else "not even one picture fits: a smaller --imgsz or a smaller model (--cfg yolov5n.yaml)",
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
        torch.stack([t.float().sum() for t in raw]).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    finally:
        run.model.zero_grad(set_to_none=True)
    return True
