"""torch.compile of network and loss: when it is chosen, what cannot be compiled, and eager mode if it fails."""

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from triton.runtime.errors import PTXASError

from tests.unit.settings import settings
from tests.unit.trainer_process import TINY
from tests.unit.yolo_folder import squares
from trainer.__main__ import _choose_caches
from trainer.config import Hyp
from trainer.distributed.comm import World
from trainer.engine.compilation import GRAPHS, MODES, PAYS_FROM, choose_mode
from trainer.engine.events import Events
from trainer.engine.trainer import Trainer
from trainer.errors import TrainerError
from trainer.strategies.network_with_loss import NetworkWithLoss, SumOfOutputs

CPU = torch.device("cpu")
GPU = torch.device("cuda")


def chosen(
    device: torch.device = GPU, ranks: int = 1, steps: int = PAYS_FROM, **more: Any
) -> tuple[str, str]:
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
    run = Trainer(
        settings(str(data), cfg=TINY, hyp=Hyp(), noautoanchor=True, **more), World(), CPU, Events({})
    )
    run.start()
    run.local_model.train()
    return run


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    for batch in run.batches():
        run.step(batch)
    return run.local_model.state_dict()


def test_torch_knows_the_options_for_a_gpu() -> None:
    """It refuses unknown ones before the first call, which would need the GPU."""
    whole = NetworkWithLoss(nn.Identity(), SumOfOutputs((1.0,)), contextlib.nullcontext)
    for mode in MODES.values():
        whole.compile_with(mode, False, GPU)


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
    of_user = tmp_path / "home/trainer/compiled"
    of_node = tmp_path / "runs/.cache/compiled"
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


def test_compilation_between_two_updates_keeps_the_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10 images the second and third batch have 3, and are compiled while the first one's gradients wait."""
    hyp = Hyp(nbs=16.0, warmup_epochs=0.0)
    states = []
    for compiled in ("off", "on"):
        # Without a compiler: the test is about what happens around it.
        monkeypatch.setattr("torch.compile", lambda function, **_: function)
        data = squares(tmp_path / compiled, train=10)
        run = Trainer(
            settings(str(data), hyp=hyp, noautoanchor=True, compile=compiled), World(), CPU, Events({})
        )
        run.start()
        run.task.prepare_targets(run.train_loader, run.evaluator.loader, run.model, pads=True)
        run.local_model.train()
        states.append(weights(run))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


#: The parts of a step that are compiled, by the functions' names.
PARTS = {"_eager": "network", "_eager_loss": "loss", "_account": "meter"}
NO_COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
REFUSED = PTXASError("PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr: ...")
OLD_DRIVER = RuntimeError("Triton Error [CUDA]: the provided PTX was compiled with an unsupported toolchain.")
CAPTURE = torch.AcceleratorError(
    "CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors ..."
)
MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


class RaisesInBackward(torch.autograd.Function):
    """Raises an error in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, error: Exception) -> torch.Tensor:
        ctx.error = error
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ctx.error


def compiler_that_fails(where: str, call: int, error: Exception) -> Callable[..., Any]:
    """Return torch.compile for a machine on which call number `call` of a part fails, after it has computed."""
    calls: Counter[str] = Counter()
    part, _, is_backward = where.partition(" ")

    def compiled(function: Any, **_: Any) -> Any:
        name = PARTS[function.__name__]

        def run(*arguments: Any) -> Any:
            calls[name] += 1
            made = function(*arguments)
            if (name, calls[name]) != (part, call):
                return made
            if not is_backward:
                raise error
            return RaisesInBackward.apply(made[0], error), *made[1:]  # type: ignore[no-untyped-call]

        return run

    return compiled


@pytest.mark.parametrize(
    ("where", "call", "error"),
    [
        ("network", 1, NO_COMPILER),  # Triton builds the kernel's launcher
        ("network", 1, REFUSED),
        ("network", 1, OLD_DRIVER),
        ("network backward", 1, REFUSED),
        ("loss", 1, REFUSED),
        ("meter", 1, REFUSED),
        ("network", 3, CAPTURE),
        ("network backward", 3, CAPTURE),
        ("network", 2, MEMORY),
        ("network", 3, MEMORY),
        ("network backward", 3, MEMORY),
        ("network", 7, CAPTURE),  # of the second size of the batches
        ("network backward", 6, MEMORY),
    ],
    ids=str,
)
def test_each_failure_on_a_gpu_ends_in_an_eager_run_with_the_same_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    call: int,
    error: Exception,
) -> None:
    expected = weights(run_of(tmp_path / "eager", compile="off"))
    capsys.readouterr()
    monkeypatch.setattr("trainer.engine.trainer.choose_mode", lambda *_, **__: (GRAPHS, ""))
    monkeypatch.setattr("torch.compile", compiler_that_fails(where, call, error))
    found = weights(run := run_of(tmp_path / "failed"))
    said = [line for line in capsys.readouterr().out.splitlines() if "eager mode" in line]
    assert len(said) == 1, said
    assert ("out of memory" if error is MEMORY else str(error).splitlines()[0]) in said[0]
    assert run.compilation.mode == ""
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    monkeypatch.setattr("torch.compile", compiler_that_fails(where, call, error))
    with pytest.raises(TrainerError, match="--compile graphs") as raised:
        weights(run_of(tmp_path / "graphs", compile="graphs"))
    assert "--compile off" in raised.value.hint
    assert ("--batch" in raised.value.hint) == (error is MEMORY)
