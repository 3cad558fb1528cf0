"""`trainer verify` with real ranks: equal gradients, and detected differences."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.unit.yolo_folder import make_yolo_set
from trainer.bench.verify import agree, compare


@pytest.mark.parametrize(
    "more", [[], ["--no-sync-bn"], ["--cfg", "yolov5nu.yaml", "--ranks", "1,3"], ["--augment-on", "device"]]
)
def test_uneven_shares_of_a_batch_train_as_one_rank_does(more: list[str], tmp_path: Path, run_trainer) -> None:
    """Three images on two ranks, or on three with one without boxes. Without synchronized batch norm, it must fail."""
    (tmp_path / "hyp.yaml").write_text("mosaic: 0\n")
    data = make_yolo_set(tmp_path, train=6)
    arguments = ["--data", str(data), "--imgsz", "64", "--batch", "3", "--ranks", "1,2", "--steps", "2", "--json"]
    arguments += ["--hyp", str(tmp_path / "hyp.yaml")]
    code, out, err = run_trainer("verify", *arguments, *more)
    assert not err
    report = json.loads(out)
    several = 3 if "1,3" in more else 2
    assert [(d["ranks"], d["step"]) for d in report["differences"]] == [(1, 1), (1, 2), (several, 1), (several, 2)]
    first, moved = report["differences"][2:]
    if "--no-sync-bn" in more:
        assert (code, report["agree"]) == (1, False)
        assert first["gradient_off"] > 0.01
    else:
        assert (code, report["agree"]) == (0, True)
        assert first["gradient_off"] < 1e-6
        assert first["gradient_norm"] > 10  # not clipped, which would hide a wrong scale
        assert moved["loss"] != first["loss"]  # another batch, other weights
        assert moved["gradient_off"] < 1e-4


def test_an_error_of_the_ranks_is_reported_once(run_trainer) -> None:
    no_gpu = [] if torch.cuda.is_available() else ["--device 0: no GPU can be used on this machine"]
    for arguments, message in (
        # Each rank gets one of the two GPUs.
        *((["--device", "0,1", "--ranks", "1,2"], f"error: {text}") for text in no_gpu),
        (["--data", "none.yaml", "--ranks", "2"], "error: none.yaml: no such dataset"),
        (["--ranks", "1,9"], "error: --ranks 1,9: each must be from 1 to --batch 8"),
        (["--ranks", "two"], "error: --ranks two"),
        (["--steps", "0"], "error: --steps is 0"),
        (["--precision", "bf16"], "error: --precision bf16"),
    ):
        code, _, err = run_trainer("verify", *arguments)
        assert code == 2
        assert err.startswith(message)
        assert err.count("error:") == 1


def test_differences_are_relative_to_the_first() -> None:
    one = {"loss": torch.tensor(2.0), "gradient": torch.tensor([3.0, 4.0])}
    two = {"loss": torch.tensor(2.002), "gradient": torch.tensor([3.0, 4.5])}
    found = compare(2, 1, two, one)
    assert found.loss_off == pytest.approx(0.001, rel=1e-3)
    assert found.gradient_off == pytest.approx(0.1)
    assert found.greatest == pytest.approx(0.5)
    assert agree([found], 0.11)
    assert not agree([found], 0.09)
    assert agree([compare(1, 1, one, one)], 0)
    broken = {"loss": torch.tensor(math.nan), "gradient": torch.tensor([math.nan, 4.0])}
    assert not agree([compare(2, 1, broken, one)], 1e9)
