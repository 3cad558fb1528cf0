"""A detector family is one file and one line: no preset, and nothing else in the trainer."""

import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from tests.unit.settings import settings
from tests.unit.yolo_folder import squares
from trainer.config import FAMILIES, Hyp, Settings
from trainer.detectors import build, read_cfg
from trainer.distributed.comm import World
from trainer.engine.events import Events
from trainer.engine.trainer import Trainer
from trainer.errors import TrainerError

FAMILY = """
    \"\"\"A network that finds one box in an image: the centre of mass of the objects.\"\"\"

    import torch
    from torch import nn

    from trainer.detectors import Detections, Parts
    from trainer.errors import TrainerError
    from trainer.losses.criterion import Criterion

    SIZES = {"s": 8, "l": 16}


    class OneBox(nn.Module):
        def __init__(self, width, nc):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.head = nn.Linear(width, 4 + nc)

        def forward(self, images):
            return self.head(self.stem(images))


    class PixelLoss(Criterion):
        \"\"\"The mean distance of the corners in pixels; the targets are the labels, as no assigner is given.\"\"\"

        terms = ("box",)

        def __init__(self):
            super().__init__([1.0])
            self.sizes = []

        def forward(self, outputs, targets, size, /):
            height, width = size
            self.sizes.append(size)
            labels = targets["labels"]
            px = outputs.new_tensor([width, height, width, height])
            found = outputs[labels[:, 0].long(), :4].sigmoid() * px
            total = (found - labels[:, 2:] * px).abs().sum() + outputs.sum() * 0
            count = torch.full((1,), len(labels), dtype=torch.float64, device=outputs.device)
            return total.reshape(1, 1), count


    def postprocess(model, outputs, limits):
        scores, classes = outputs[:, 4:].sigmoid().max(1)
        return [
            Detections(box[None].cpu(), score[None].cpu(), cls[None].cpu())
            for box, score, cls in zip(outputs[:, :4].sigmoid() * 64, scores, classes)
        ]


    def build(cfg, *, nc, where, hyp, imgsz):
        size = cfg["onebox"]
        if size not in SIZES:
            raise TrainerError(f"{where}: no size {size!r}", "use s or l")
        return Parts(OneBox(SIZES[size], nc), PixelLoss(), postprocess)
"""


@pytest.fixture
def onebox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the family as CONTRIBUTING.md says: a file, and a line in FAMILIES."""
    (tmp_path / "onebox_family.py").write_text(dedent(FAMILY))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FAMILIES, "onebox", "onebox_family")
    yield
    sys.modules.pop("onebox_family", None)


@pytest.mark.usefixtures("onebox")
def test_a_family_without_a_preset_trains_and_its_loss_knows_the_images_size(tmp_path: Path) -> None:
    data = squares(tmp_path / "set", train=8, widths=(160,))
    own: Any = {"data": str(data), "cfg": "onebox-s", "batch": 4, "imgsz": 64, "epochs": 1, "rect": True}
    training = Trainer(settings(**own), World(), torch.device("cpu"), Events({}))
    training.start()
    criterion: Any = training.task.criterion()
    before = training.model.head.weight.clone()
    shapes = []
    for number, batch in enumerate(training.train_loader.epoch(0)):
        training.train_step(batch, training.state, number, is_last=True)
        shapes.append(tuple(batch.images.shape[1:3]))
    assert criterion.sizes == shapes
    assert shapes[0][0] < shapes[0][1]
    assert not torch.equal(training.model.head.weight, before)
    evaluator = training.evaluator
    scores = evaluator(training.model, evaluator.loader, torch.device("cpu"), torch.bfloat16, criterion)
    # The boxes were in bf16, as no family needs to convert its outputs.
    assert scores.columns()["map50"] >= 0


@pytest.mark.usefixtures("onebox")
def test_a_family_without_a_preset_has_the_defaults_of_torchvisions_detectors() -> None:
    usual = Settings(cfg="torchvision:fcos_resnet50_fpn", data="x.yaml")
    mine = Settings(cfg="onebox-s", data="x.yaml")
    assert (mine.optimizer, mine.schedule, mine.epochs, mine.hyp) == (
        "AdamW",
        "cosine",
        usual.epochs,
        usual.hyp,
    )
    assert isinstance(
        build(read_cfg("onebox-l"), nc=2, where="--cfg", hyp=Hyp(), imgsz=64).model, torch.nn.Module
    )


@pytest.mark.usefixtures("onebox")
def test_a_misspelt_name_is_answered_with_the_family() -> None:
    with pytest.raises(TrainerError, match="no such model") as error:
        read_cfg("onebx-s")
    assert "onebox-s" in error.value.hint
