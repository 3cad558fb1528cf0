"""The line of a training's progress."""

import re

import pytest

from trainer.engine import display
from trainer.engine.display import TrainingDisplay

STEP = {
    "epoch": 1,
    "epochs": 2,
    "step": 3,
    "steps": 4,
    "loss": 0.5,
    "images_per_s": 70.0,
    "eta_s": 1,
    "run_eta_s": 90,
}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, "loss 0.500   70 images/s"),  # from the events of ranks, which have the sum alone
        ({"terms": {"mask": 0.5}}, "loss 0.500   70 images/s"),
        ({"terms": {"box": 0.2, "cls": 0.3}}, "loss 0.500 (box 0.200, cls 0.300)   70 images/s"),
        (
            {"terms": {"box": 0.2, "cls": 0.3}, "memory": 2_340_000_000},
            "(box 0.200, cls 0.300)   2.3 GB   70 images/s",
        ),
    ],
)
def test_a_line_has_the_parts_of_the_loss_and_the_memory_of_the_gpu(capsys, monkeypatch, more, expected):
    monkeypatch.setattr(display, "PLAIN_EVERY_S", -1.0)
    TrainingDisplay(enabled=True, launched=False).progress(**STEP, **more)
    line = capsys.readouterr().out
    assert expected in line
    assert re.search(r"epoch ends in 1 s, run in 1:30$", line.strip())
