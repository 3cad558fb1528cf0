"""N ranks train as one does, shown with real ranks; and where they do not, it is seen."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.trainer_process import FORKING
from tests.unit.yolo_folder import make_yolo_set
from trainer.__main__ import main
from trainer.verify import agree, compare


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, str]:
    monkeypatch.setattr(sys, "argv", ["trainer", "verify", *arguments])
    monkeypatch.setattr("trainer.ranks.subprocess", FORKING)
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, *capsys.readouterr()


@pytest.mark.parametrize("more", [[], ["--no-sync-bn"]])
def test_uneven_shares_of_a_batch_train_as_one_rank_does(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three pictures on two ranks, with mosaics and colours. Without the common batch norm it must fail."""
    data = make_yolo_set(tmp_path, train=6)
    arguments = ["--data", str(data), "--imgsz", "64", "--batch", "3", "--ranks", "1,2", "--steps", "2", "--json"]
    code, out, err = run(monkeypatch, capsys, *arguments, *more)
    assert not err
    said = json.loads(out)
    assert [(d["ranks"], d["step"]) for d in said["differences"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    first, moved = said["differences"][2:]
    if more:
        assert (code, said["agree"]) == (1, False)
        assert first["gradient_off"] > 0.01
    else:
        assert (code, said["agree"]) == (0, True)
        assert first["gradient_off"] < 1e-6
        assert first["gradient_norm"] > 10  # not clipped, which would hide a wrong scale
        assert moved["loss"] != first["loss"]  # another batch, other weights
        assert moved["gradient_off"] < 1e-4


def test_what_a_rank_finds_wrong_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_gpu = [] if torch.cuda.is_available() else ["--device 0: no GPU can be used on this machine"]
    for arguments, said in (
        # One rank gets one of the two; with both it would be refused before they are looked for.
        *((["--device", "0,1", "--ranks", "1,2"], f"error: {said}") for said in no_gpu),
        (["--data", "none.yaml", "--ranks", "2"], "error: --data none.yaml: no such file"),
        (["--ranks", "1,9"], "error: --ranks 1,9: each must be from 1 to --batch 8"),
        (["--ranks", "two"], "error: --ranks two"),
        (["--steps", "0"], "error: --steps is 0"),
        (["--precision", "bf16"], "error: --precision bf16"),
    ):
        code, _, err = run(monkeypatch, capsys, *arguments)
        assert code == 2
        assert err.startswith(said)
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
