"""The run's folder and its checkpoints: plain tensors and values, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import contract
from trainer.errors import TrainerError
from trainer.weights import download, official

FORMAT = 1
KEYS = ("format", "model", "ema", "optimizer", "epoch", "step", "hyp", "cfg", "names", "imgsz")


def make_run_dir(environment: Mapping[str, str], project: str, name: str, exist_ok: bool) -> Path:
    """The launcher's folder where it gave one, else a new project/name, name2, name3, ..."""
    given = environment.get(contract.RUN_DIR)
    if given:
        path = Path(given)
        if not path.is_dir():
            raise TrainerError(f"{contract.RUN_DIR} {path}: no such folder", "the launcher must create or mount it")
        check_writable(path)
        return path
    parent = Path(project)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = parent / (name if number == 1 else f"{name}{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir(exist_ok=exist_ok)
                break
            if exist_ok:
                raise TrainerError(f"{path} is a file, not a folder")
            number += 1
    except OSError as error:
        raise TrainerError(
            f"{path if parent.is_dir() else parent}: cannot be created: {error.strerror}{_ownership(parent)}",
            "choose another folder with --project",
        ) from error
    check_writable(path)
    return path


def check_writable(path: Path) -> None:
    """An error that names the owner where a file cannot be made in the folder `path`."""
    probe = download.partial(path / "write-test")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise TrainerError(
            f"{path}: cannot write there: {error.strerror}{_ownership(path)}",
            "make the folder writable for that user, or run as its owner",
        ) from error


def _ownership(path: Path) -> str:
    """Who we are and whose the nearest existing folder is: the usual cause in a container."""
    while not path.exists() and path != path.parent:
        path = path.parent
    uid = os.getuid() if hasattr(os, "getuid") else "?"
    return f" (we are uid {uid}, {path} belongs to uid {path.stat().st_uid})"


def save(path: Path, content: dict[str, Any], previous: Path | None = None) -> None:
    """Write a checkpoint beside its place, then rename it there: a reader sees the old one or the new one.

    The one that it replaces is kept as `previous`, where that is given. `path` exists at every moment.
    """
    missing = [key for key in KEYS if key not in content]
    if missing:
        raise ValueError(f"a checkpoint needs {missing}")
    temporary = download.partial(path)
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        if previous and path.exists():
            _keep(path, previous)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch's own, of which a full disk is only the context
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _keep(path: Path, previous: Path) -> None:
    """Give the file at `path` the second name `previous`; a file system without hard links gets a copy."""
    temporary = download.partial(previous)
    try:
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        temporary.replace(previous)
    finally:
        # After a kill between two renames `previous` is a link to the same file, and rename(2) leaves both names.
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file whole or not at all."""
    temporary = download.partial(path)
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def copied(content: Any) -> Any:
    """The same content with tensors of its own on the CPU, that no optimizer step changes."""
    if isinstance(content, torch.Tensor):
        return content.detach().to("cpu", copy=True)
    if isinstance(content, dict):
        return {k: copied(v) for k, v in content.items()}
    return [copied(v) for v in content] if isinstance(content, list) else content


def load(weights: str) -> dict[str, Any]:
    """Read a checkpoint onto the CPU: ours, or one of YOLOv5's; nothing in the file is executed.

    `weights` is a path, a release file's name or an address (trainer/weights/download.py). One of YOLOv5's has no
    optimizer.
    """
    path = download.locate(weights)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise TrainerError(
            f"--weights {weights}: no such file",
            f"the names that are fetched are {', '.join(download.NAMES)}; '' starts from scratch",
        ) from None
    except pickle.UnpicklingError:  # whole objects: one of YOLOv5's, or nothing that is wanted here
        return {"format": FORMAT, "optimizer": None, "step": 0, **official.load(str(path))}
    except Exception as error:  # an unpickler raises what it likes at bytes that were never pickled
        raise _foreign(weights) from error
    if not isinstance(content, dict) or any(key not in content for key in KEYS):
        raise _foreign(weights)
    if content["format"] > FORMAT:
        raise TrainerError(f"--weights {weights}: written by a newer version of this trainer", "update this one")
    return content


def check_task(content: Mapping[str, Any], task: str, weights: str, hint: str = "") -> None:
    """An error for a checkpoint of another task; `hint` says what to do, by default to train with the other one."""
    of = content.get("task", "detect")
    if of != task:
        raise TrainerError(
            f"--weights {weights}: they were trained with --task {of}, not {task}",
            hint or f"use --task {of}, or weights of a {task} model",
        )


def _foreign(weights: str) -> TrainerError:
    return TrainerError(
        f"--weights {weights}: not a checkpoint of this trainer or of YOLOv5, or damaged",
        "give a best.pt or last.pt that one of them wrote, or '' to start from scratch",
    )


def transfer(model: nn.Module, state: Mapping[str, torch.Tensor], where: str) -> tuple[int, int]:
    """Copy the tensors that fit (another number of classes leaves the head out): how many of how many."""
    own = model.state_dict()  # it shares the model's memory
    fitting = [k for k, v in state.items() if k in own and own[k].shape == v.shape]
    if len(fitting) < len(own) / 2:
        raise TrainerError(
            f"--weights {where}: only {len(fitting)} of {len(own)} tensors fit this model",
            "use the --cfg that the checkpoint was trained with (leave --cfg out)",
        )
    for key in fitting:  # not by load_state_dict, where torchvision's hooks ask for the version of a file
        own[key].copy_(state[key])
    return len(fitting), len(own)
