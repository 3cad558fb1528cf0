"""A training step on the device "meta", which has no values: whatever makes the host wait for one is an error there.

These are `item`, `tolist`, a copy to the host, `nonzero`, `unique` and boolean indices. Meta tensors also count the
operations of a step, most of which are one kernel on a GPU.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.meta_device import Launches, meta_device, start
from tests.unit.settings import settings
from tests.unit.yolo_folder import squares
from trainer.config import Hyp
from trainer.distributed.comm import World
from trainer.engine.events import Events
from trainer.engine.trainer import Trainer
from trainer.losses.anchored import DetectionLoss


@pytest.fixture
def started() -> Iterator[Any]:
    """Return a function that starts a run on the device "meta"."""
    with meta_device():
        yield lambda **more: start(settings(**{"hyp": Hyp(), "precision": "fp32", **more}))


@pytest.fixture
def steps(started: Any) -> Any:
    """Return a function that makes three steps of a run and returns the operations of the last one."""

    def run(**more: Any) -> Counter[str]:
        training = started(**more)
        for batch, _ in zip(training.train_loader.epoch(0, 0), range(3), strict=False):
            with Launches() as launches:
                training.step(batch)
        return launches.operations

    return run


@pytest.mark.parametrize(
    ("cfg", "most"), [("yolov5n.yaml", 629), ("yolov5nu.yaml", 818), ("yolo26n.yaml", 1445)]
)
def test_a_step_of_a_detector_has_no_host_wait_and_few_launches(
    cfg: str, most: int, steps: Any, tmp_path: Path
) -> None:
    data = squares(tmp_path / "set", train=30)
    counted = steps(data=str(data), cfg=cfg, batch=8, imgsz=64, noautoanchor=True)
    print(f"{cfg}: {counted.total()} operations")
    assert 500 < counted.total() <= most


def test_a_wait_is_an_error_here(steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant one in the loss."""
    whole = DetectionLoss.forward

    def waits(self: DetectionLoss, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sums, counts = whole(self, *arguments)
        return (sums if float(sums.sum()) >= 0 else -sums), counts

    monkeypatch.setattr(DetectionLoss, "forward", waits)
    with pytest.raises(RuntimeError, match="meta tensor"):
        steps(
            data=str(squares(tmp_path / "set", train=30)),
            cfg="yolov5n.yaml",
            batch=8,
            imgsz=64,
            noautoanchor=True,
        )


class Shapes(TorchDispatchMode):
    """Records every operation with the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, made))
        self.seen.append((func, *(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))))
        return made


@pytest.mark.parametrize("cfg", ["yolov5n.yaml", "yolov5nu.yaml", "yolo26n.yaml"])
def test_no_operation_of_a_step_has_a_shape_that_depends_on_the_labels(
    cfg: str, started: Any, tmp_path: Path
) -> None:
    data = squares(tmp_path / "set", train=80)
    training = started(
        data=str(data), cfg=cfg, batch=8, imgsz=64, noautoanchor=True, hyp=Hyp(close_mosaic=0.0)
    )
    steps = []
    labels = set()
    for batch in training.train_loader.epoch(0, 0):
        with Shapes() as shapes:
            training.step(batch)
        steps.append(shapes.seen)
        labels.add(len(batch.labels))
    assert len(labels) > 3  # the batches have different numbers of boxes
    assert len(steps[-1]) > 500
    later = [seen for seen in steps[1:-1] if len(seen) == len(steps[1])]  # with an update, like the second
    assert len(later) > 3
    assert all(seen == later[0] for seen in later)


@pytest.mark.parametrize("cfg", ["yolov5n.yaml", "yolov5nu.yaml", "yolo26n.yaml"])
def test_two_hundred_batches_of_different_labels_compile_once(cfg: str, tmp_path: Path) -> None:
    """With torch's frontend alone: what makes it compile again is the same for every backend."""
    how = {
        "data": str(squares(tmp_path / "set", train=20)),
        "cfg": cfg,
        "batch": 4,
        "imgsz": 64,
        "noautoanchor": True,
    }
    how |= {"epochs": 40, "hyp": Hyp(close_mosaic=0.0)}
    training = Trainer(settings(**how), World(), torch.device("cpu"), Events({}))
    training.start()
    training.task.prepare_targets(training.train_loader, training.evaluator.loader, training.model, pads=True)
    raw = [t.detach() for t in training.local_model(torch.zeros(4, 3, 64, 64))]
    traces = []

    def backend(graph: Any, _: Any) -> Any:
        traces.append(graph)
        return graph.forward

    loss = torch.compile(training.task.criterion().forward, backend=backend, fullgraph=True, dynamic=False)
    counts = set()
    for epoch in range(40):
        for batch in training.train_loader.epoch(epoch):
            sums, _ = loss(raw, batch.targets, (64, 64))
            counts.add(len(batch.labels))
    assert sums.isfinite().all()
    assert len(counts) > 5
    assert len(traces) == 1
