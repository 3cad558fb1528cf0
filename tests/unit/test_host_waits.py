"""A training step on the device "meta", which has no values: whatever makes the host wait for one is an error there.

These are `item`, `tolist`, a copy to the host, `nonzero`, `unique` and boolean indices. Meta tensors also count the
operations of a step, most of which are one kernel on a GPU. Simulates no streams, and no process group.
"""

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.settings import settings
from tests.unit.yolo_folder import squares
from trainer.config import Hyp
from trainer.distributed.comm import World
from trainer.engine import trainer
from trainer.engine.events import Events
from trainer.engine.optim import build_optimizer
from trainer.engine.trainer import Trainer
from trainer.losses.detection import DetectionLoss

#: Operations that launch no kernel.
VIEWS = ("view", "reshape", ".t.", "transpose", "permute", "expand", "select", "slice", "squeeze", "detach", "alias")
VIEWS += ("split", "unbind", "as_strided", "empty")
META = torch.device("meta")


class Launches(TorchDispatchMode):
    """Counts operations by name, without views, and without those of the gradient norm, which are fused on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        tensors = [each for each in torch.utils._pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
        if any(each.device == META for each in tensors) and not any(word in name for word in VIEWS):
            self.operations[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes three steps of a run and returns the operations of the last one."""
    monkeypatch.setattr(
        "trainer.distributed.strategy.nn.utils.clip_grad_norm_", lambda *_: torch.zeros((), device=META)
    )

    def unfused(*arguments: Any) -> torch.optim.Optimizer:
        made = build_optimizer(*arguments)
        for group in made.param_groups:
            group |= {"fused": False, "foreach": True}  # meta has no fused kernels
        return made

    monkeypatch.setattr(trainer, "build_optimizer", unfused)
    monkeypatch.setattr(Trainer, "autocast", lambda _: contextlib.nullcontext())  # meta has none

    def run(**more: Any) -> Counter[str]:
        training = Trainer(settings(**{"hyp": Hyp(), "precision": "fp32", **more}), World(), META, Events({}))
        training.start()
        if isinstance(training.loss, DetectionLoss):  # otherwise copied from the device at the first step
            training.loss.anchors = torch.tensor([[[1.25, 1.625], [2, 3.75], [4.125, 2.875]]] * 3)
        training.local_model.train()
        for batch, _ in zip(training.train_loader.epoch(0, 0), range(3), strict=False):
            with Launches() as launches:
                training.step(batch)
        return launches.operations

    return run


@pytest.mark.parametrize(("cfg", "most"), [("yolov5n.yaml", 629), ("yolov5nu.yaml", 803)])
def test_a_step_of_a_detector_has_no_host_wait_and_few_launches(
    cfg: str, most: int, steps: Any, tmp_path: Path
) -> None:
    data = squares(tmp_path / "set", train=30)
    counted = steps(data=str(data), cfg=cfg, batch=8, imgsz=64, noautoanchor=True)
    print(f"{cfg}: {counted.total()} operations")
    assert 500 < counted.total() <= most


def test_a_wait_is_an_error_here(steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant one in the loss."""
    whole = DetectionLoss.__call__

    def waits(self: DetectionLoss, *arguments: Any) -> torch.Tensor:
        terms = whole(self, *arguments)
        return terms if float(terms.sum()) >= 0 else -terms

    monkeypatch.setattr(DetectionLoss, "__call__", waits)
    with pytest.raises(RuntimeError, match="meta tensor"):
        steps(data=str(squares(tmp_path / "set", train=30)), cfg="yolov5n.yaml", batch=8, imgsz=64, noautoanchor=True)
