"""torch.compile of network and loss: when it is chosen, what cannot be compiled, and eager mode if it fails."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.settings import settings
from tests.unit.trainer_process import TINY
from tests.unit.yolo_folder import squares
from trainer.__main__ import _choose_caches
from trainer.config import Hyp
from trainer.distributed.comm import World
from trainer.engine.compilation import GRAPHS, PAYS_FROM, choose_mode
from trainer.engine.events import Events
from trainer.engine.trainer import Trainer
from trainer.errors import TrainerError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def chosen(device: torch.device = GPU, ranks: int = 1, steps: int = PAYS_FROM, **more: Any) -> tuple[str, str]:
    return choose_mode(settings("digits", **more), device, ranks, steps)


def test_auto_compiles_long_runs_on_a_gpu() -> None:
    assert chosen() == (GRAPHS, "")
    assert chosen(CPU) == ("", "")
    assert chosen(compile="off") == ("", "")
    assert chosen(compile="on", steps=1) == ("default", "")
    assert chosen(compile="graphs", steps=1) == (GRAPHS, "")


@pytest.mark.parametrize(
    ("more", "ranks", "reason"),
    [
        ({"parallel": "fsdp"}, 2, "--parallel fsdp"),
        ({"sync_bn": True}, 2, "--sync-bn"),
        ({"multi_scale": True}, 1, "--multi-scale"),
        ({"rect": True}, 1, "--rect"),
    ],
)
def test_what_cannot_be_compiled_is_said_or_refused(more: dict[str, Any], ranks: int, reason: str) -> None:
    mode, note = chosen(ranks=ranks, **more)
    assert mode == ""
    assert reason in note
    with pytest.raises(TrainerError, match=reason):
        chosen(ranks=ranks, compile="graphs", **more)


def test_images_of_many_shapes_can_be_compiled_without_graphs() -> None:
    assert chosen(compile="on", multi_scale=True) == ("default", "")


def test_a_short_run_and_a_machine_without_a_compiler_are_not_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert chosen(steps=PAYS_FROM - 1)[0] == ""
    assert "does not repay" in chosen(steps=PAYS_FROM - 1)[1]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler" in chosen()[1]


def run_of(tmp_path: Path, **more: Any) -> Trainer:
    data = squares(tmp_path / "set", train=7)  # batches of 4 and 3 images
    run = Trainer(settings(str(data), cfg=TINY, hyp=Hyp(), noautoanchor=True, **more), World(), CPU, Events({}))
    run.start()
    run.local_model.train()
    return run


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    for batch in run.batches():
        run.step(batch)
    return run.local_model.state_dict()


def test_a_failed_compilation_leaves_an_eager_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a C++ compiler that does not exist; on a CPU, --compile auto would not try it."""
    expected = weights(run_of(tmp_path / "eager", compile="off"))
    monkeypatch.setattr("trainer.engine.trainer.choose_mode", lambda *_, **__: ("default", ""))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/no/such/compiler",))
    monkeypatch.setattr("torch._inductor.config.fx_graph_cache", False)
    found = weights(run_of(tmp_path / "failed"))
    said = capsys.readouterr().out
    assert "eager mode, because compilation failed" in said
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    with pytest.raises(TrainerError, match="--compile on"):
        weights(run_of(tmp_path / "on", compile="on"))


def test_compiled_code_outlives_a_container_and_is_kept_where_the_process_may_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Root may write everywhere, but not below a file."""
    (tmp_path / "file").touch()
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    of_user, of_node = tmp_path / "home/trainer/compiled", tmp_path / "runs/.cache/compiled"
    for folder, expected in {"": of_user, "runs/.cache": of_node, "file/.cache": of_user}.items():
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("CLUSTER_CACHE_DIR", str(tmp_path / folder) if folder else "")
        _choose_caches()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(expected)
        assert os.environ["TRITON_CACHE_DIR"] == str(expected / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    _choose_caches()
    assert os.environ["TRITON_CACHE_DIR"] == "mine"


def test_downloads_outlive_a_container_unless_its_image_brings_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CLUSTER_CACHE_DIR", str(tmp_path / "node"))

    def chosen() -> list[str | None]:
        names = ("TORCH_HOME", "HF_HUB_CACHE")
        for name in (*names, "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME"):
            monkeypatch.delenv(name, raising=False)
        _choose_caches()
        return [os.environ.get(name) for name in names]

    of_node = [str(tmp_path / "node" / name) for name in ("torch", "huggingface")]
    assert chosen() == of_node
    (tmp_path / "home/torch").mkdir(parents=True)
    assert chosen() == [None, of_node[1]]
    monkeypatch.delenv("CLUSTER_CACHE_DIR")
    assert chosen() == [None, None]


def test_compilation_between_two_updates_keeps_the_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 images the second and third batch have 3, and are compiled while the first one's gradients wait."""
    hyp = Hyp(nbs=16.0, warmup_epochs=0.0)
    states = []
    for compiled in ("off", "on"):
        # Without a compiler: the test is about what happens around it.
        monkeypatch.setattr("trainer.engine.step.torch.compile", lambda function, **_: function)
        data = squares(tmp_path / compiled, train=10)
        run = Trainer(settings(str(data), hyp=hyp, noautoanchor=True, compile=compiled), World(), CPU, Events({}))
        run.start()
        run.task.prepare_targets(run.train_loader, run.model, pads=True)
        run.local_model.train()
        states.append(weights(run))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
