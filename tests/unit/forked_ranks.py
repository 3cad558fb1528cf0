"""Ranks as processes of one fork server that has imported torch once: many short trainings in little time."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.unit.trainer_process import ranks
from trainer.config import PRESETS, Settings
from trainer.models.blocks import Conv
from trainer.models.yolo import build_yolo, load_cfg
from trainer.parallel import settings_for

_CONTEXT = multiprocessing.get_context("forkserver")


def run(folder: Path, count: int, *arguments: str) -> list[int]:
    """`trainer ARGUMENTS` in `folder`, once for each rank: the exit codes. What they say is in said0, said1, ..."""
    return call(_trainer, folder, count, *arguments)


def call(program: Callable[..., None], folder: Path, count: int, *arguments: str) -> list[int]:
    """The same of any function: `program(ARGUMENTS)` in each rank, with a rank's environment."""
    # torch's optimizers load torch._dynamo at their first use, which takes longer than the trainer itself
    _CONTEXT.set_forkserver_preload(["torch._dynamo", "trainer.training.loop", "trainer.verify", "trainer.cli"])
    places = [(folder, k, place, program, arguments) for k, place in enumerate(ranks(count))]
    processes = [_CONTEXT.Process(target=_rank, args=place) for place in places]  # type: ignore[attr-defined]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        process.kill()
    return [-1 if process.exitcode is None else process.exitcode for process in processes]


def _rank(
    folder: Path, number: int, place: dict[str, str], program: Callable[..., None], arguments: tuple[str, ...]
) -> None:
    os.chdir(folder)
    os.environ.update(place, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    with Path(f"said{number}").open("w", buffering=1) as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        faulthandler.enable(2)  # a crash in C code says which line of Python has led to it
        program(*arguments)


def _trainer(*arguments: str) -> None:
    sys.argv = ["trainer", *arguments]
    from trainer.__main__ import main

    main()


def without_batch_norm(nc: int) -> nn.Module:
    """A detector that treats every picture by itself: its gradients do not depend on what is beside it."""
    return _by_picture(build_yolo(load_cfg("yolov5n.yaml"), nc=nc))


def without_anchors(nc: int) -> nn.Module:
    """The same with the head whose loss divides by what the outputs tell."""
    cfg = load_cfg("yolov5n.yaml")
    cfg["head"] = [*cfg["head"][:-1], [[17, 20, 23], 1, "DetectDFL", ["nc"]]]
    return _by_picture(build_yolo(cfg, nc=nc))


def _by_picture(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Conv):
            module.bn = nn.GroupNorm(1, module.bn.num_features)
    return model


def settings(**more: Any) -> Settings:
    """A training on digits whose every step moves the weights."""
    told: dict[str, Any] = dict.fromkeys(("cfg", "weights", "project"), "") | {"data": "digits", "device": "cpu"}
    told |= {"epochs": 100, "batch": 8, "imgsz": 64, "optimizer": "SGD", "schedule": "linear", "precision": "fp32"}
    told |= {"workers": 0, "seed": 0, "name": "verify", "exist_ok": False, "val": False, "sync_bn": True, **more}
    hyp = dataclasses.replace(PRESETS["digits"].hyp, nbs=float(told["batch"]), warmup_epochs=0.0)
    return Settings(**{"hyp": hyp, **told})


def steps(folder: Path, count: int, number: int = 2, wide: bool = True, **more: Any) -> list[dict[str, torch.Tensor]]:
    """Loss and gradient of the first steps, as `trainer verify` records them."""
    content = dataclasses.asdict(settings_for(settings(**more), count))
    asked, path = folder / "asked.json", folder / "found.pt"
    asked.write_text(json.dumps({**content, "steps": number, "wide": wide}))
    assert run(folder, count, "verify", "--record", f"{asked},{path}") == [0] * count, said(folder)
    found: list[dict[str, torch.Tensor]] = torch.load(path, weights_only=True)
    return found


def said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("said*")))
