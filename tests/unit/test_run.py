"""What a run is made of before its first step: the weights that it takes over, and what it tells of the loaders."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.settings import settings
from tests.unit.yolo_folder import squares
from trainer.config import Hyp
from trainer.distributed.comm import World
from trainer.engine import trainer
from trainer.engine.events import Events
from trainer.engine.trainer import Trainer
from trainer.errors import TrainerError
from trainer.models.precision import set_algorithms
from trainer.models.yolo import build_yolo, load_cfg
from trainer.weights import checkpoint_file

WIDE = [[20.0, 10.0, 32.0, 16.0, 66.0, 23.0]] * 3


def made(data: Path, **more: Any) -> Trainer:
    return Trainer(settings(str(data), **{"hyp": Hyp(), **more}), World(), torch.device("cpu"), Events({}))


def test_the_anchors_of_a_file_that_is_named_win_over_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = squares(tmp_path / "set", train=6)
    cfg = {**load_cfg("yolov5n.yaml"), "anchors": WIDE}
    state = build_yolo(cfg, nc=2).state_dict()
    content = {"format": 1, "model": state, "ema": state, "optimizer": None, "epoch": 1, "step": 1, "hyp": {}}
    checkpoint_file.save(tmp_path / "x.pt", {**content, "cfg": cfg, "names": ["green", "red"], "imgsz": 64})

    def pixels(**more: Any) -> torch.Tensor:
        run = made(data, weights=str(tmp_path / "x.pt"), **more)
        assert run.task.cfg["anchors"] == (load_cfg("yolov5n.yaml") if more else cfg)["anchors"]
        assert torch.equal(run.model.state_dict()["model.0.conv.weight"], state["model.0.conv.weight"])
        return run.model.detect.anchors * torch.tensor([8, 16, 32]).view(3, 1, 1)

    assert pixels().flatten(1).tolist() == WIDE
    assert "349/349 tensors\n" in capsys.readouterr().out
    assert pixels(cfg="yolov5n.yaml")[0].flatten().tolist() == [10, 13, 16, 30, 33, 23]
    assert "348/349 tensors; the anchors are taken from yolov5n.yaml\n" in capsys.readouterr().out


def test_fp32_that_was_asked_for_is_not_tf32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default for convolutions on GPUs since Ampere."""
    data = squares(tmp_path / "set", train=6)
    for precision, tf32 in (("auto", True), ("fp32", False)):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
        made(data, precision=precision)
        assert torch.backends.cudnn.allow_tf32 is tf32


def test_tf32_is_allowed_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    try:
        made(squares(tmp_path / "set", train=6), precision="fp32", tf32=True)
        assert torch.backends.cudnn.allow_tf32
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_cudnn_is_fast_or_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    set_algorithms(deterministic=False, has_one_shape=True)
    assert torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        set_algorithms(deterministic=True, has_one_shape=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("multi_scale", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_training_on_a_gpu_chooses_the_algorithms(
    deterministic: bool, multi_scale: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The constructor of Trainer needs no GPU for this, except to ask for bf16."""
    chosen: list[dict[str, bool]] = []
    monkeypatch.setattr(trainer, "native_bf16", lambda _: False)
    monkeypatch.setattr(trainer, "set_algorithms", lambda **options: chosen.append(options))
    more = {"hyp": Hyp(), "deterministic": deterministic, "multi_scale": multi_scale}
    Trainer(
        settings(str(squares(tmp_path / "set", train=6)), **more), World(), torch.device("cuda"), Events({})
    )
    assert chosen == [{"deterministic": deterministic, "has_one_shape": not multi_scale}]


def test_compile_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(TrainerError, match="this machine has no C"):
        made(squares(tmp_path / "set", train=6), compile="on")


def test_gradients_that_accumulate_are_not_the_memory_of_cuda_graphs(tmp_path: Path) -> None:
    """The next step overwrites a gradient that autograd makes there. Run without a compiler, so without graphs."""
    data = squares(tmp_path / "set", train=6)
    states = []
    for compiled in ("graphs", "off"):
        hyp = Hyp(nbs=4.0, warmup_epochs=0.0)
        run = made(data, compile=compiled, imgsz=64, batch=2, freeze="3", unfreeze=1, hyp=hyp)
        run.start()
        run.compilation.mode = ""
        for _ in range(2):
            for batch in run.batches():
                result = run.step(batch)
                assert compiled == "off" or all(p.grad is None for p in run.update.parameters)
                assert result.updated == (run.state.step != 1)  # the first of each two, and the last of three
            run.begin_epoch()
        states.append(run.local_model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("key", ["cutmix", "randaugment", "pad"])
def test_a_hyper_parameter_of_another_task_is_refused(key: str, tmp_path: Path) -> None:
    data = squares(tmp_path / "set", train=6)
    with pytest.raises(TrainerError, match=f"{key} has no effect on boxes"):
        made(data, hyp=dataclasses.replace(Hyp(), **{key: 0.5}))


def test_what_both_loaders_have_to_say_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with little shared memory, and with a set without outlines."""
    data = squares(tmp_path / "set", train=6, val=12)
    monkeypatch.setattr(
        "trainer.data.loading.dataloader.shutil.disk_usage", lambda _: SimpleNamespace(free=445 << 10)
    )
    made(data, hyp=dataclasses.replace(Hyp(), copy_paste=0.5), workers=3)
    said = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("copy_paste has no effect here") for line in said) == 1
    # The batches of the two have not the same size.
    assert sum(line.startswith("/dev/shm has room for 0 MiB, but 3 workers") for line in said) == 2
