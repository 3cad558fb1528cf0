"""Run folders, and checkpoint files: written atomically, read without running code."""

import contextlib
import itertools
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from trainer import contract
from trainer.config.other_models import other_model
from trainer.errors import TrainerError
from trainer.weights import download, official, torch_archive
from trainer.weights.checkpoint import KEYS, Checkpoint, RunCheckpoint, RunState

FORMAT = 1
LAST = contract.LAST_CHECKPOINT
PREVIOUS = contract.PREVIOUS_CHECKPOINT


def make_run_dir(environment: Mapping[str, str], project: str, name: str, exist_ok: bool) -> Path:
    """Return the launcher's run folder, else create project/name, name2, name3, ..."""
    given = environment.get(contract.RUN_DIR)
    if given:
        path = Path(given)
        if not path.is_dir():
            raise TrainerError(
                f"{contract.RUN_DIR} {path}: no such folder", "the launcher must create or mount it"
            )
        check_writable(path)
        return path
    parent = Path(project)
    for option, text in (("--project", project), ("--name", name)):
        if not _is_utf8(text):
            raise TrainerError(
                f"{option} {text}: not UTF-8, which TensorBoard's files need", "choose another name"
            )
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = parent / (name if number == 1 else f"{name}{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir(exist_ok=exist_ok)
                break
            if exist_ok:
                raise TrainerError(f"{path} is a file, not a folder")
    except OSError as error:
        what = (
            f"{path if parent.is_dir() else parent}: cannot be created: {error.strerror}{_ownership(parent)}"
        )
        raise TrainerError(what, "choose another folder with --project") from error
    check_writable(path)
    return path


def _is_utf8(text: str) -> bool:
    """Return whether a word of the command line was UTF-8. Python keeps other bytes as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_writable(path: Path) -> None:
    """Raise TrainerError, which names the owner, if the folder `path` is not writable."""
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        what = f"{path}: cannot write there: {error.strerror}{_ownership(path)}"
        raise TrainerError(what, "make the folder writable for that user, or run as its owner") from error


def _ownership(path: Path) -> str:
    """Describe this process's uid and the owner of the nearest existing folder: in a container they often differ."""
    while not path.exists() and path != path.parent:
        path = path.parent
    uid = os.getuid() if hasattr(os, "getuid") else "?"
    return f" (we are uid {uid}, {path} belongs to uid {path.stat().st_uid})"


def save(path: Path, content: Checkpoint, previous: Path | None = None) -> None:
    """Write a checkpoint atomically: a reader sees the old or the new one, and `path` exists at every moment.

    The old one is kept as `previous`, if given.
    """
    missing = [key for key in KEYS if key not in content]
    if missing:
        raise ValueError(f"a checkpoint needs {missing}")
    try:
        with download.replacing(path) as temporary:
            with temporary.open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            if previous and path.exists():
                _keep(path, previous)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        # torch raises RuntimeError with a full disk's OSError as its context.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error


def _sync_folder(folder: Path) -> None:
    """Make the new name of a file durable, where the file system can do that for a folder."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(opened)
    finally:
        os.close(opened)


def _keep(path: Path, previous: Path) -> None:
    """Hard-link the file at `path` to `previous`, or copy it on a file system without hard links."""
    # After a kill between two renames `previous` is a link to the same file, and rename(2) leaves both names.
    with download.replacing(previous) as temporary:
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file atomically."""
    with download.replacing(path) as temporary:
        temporary.write_bytes(content)


def copied(content: RunState) -> RunState:
    """Copy a checkpoint's content, with its tensors on the CPU."""
    copy = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), content)
    return cast(RunState, copy)


def load(weights: str, *, device: str = "cpu") -> Checkpoint:
    """Load a checkpoint of this trainer, YOLOv5 or ultralytics on the CPU, without running code from the file.

    `weights` is a path, a release file's name or a URL (trainer/weights/download.py). All have the averaged weights,
    `ema`; only the files that a run is resumed from have more (see `is_resumable`). With the device "meta" the tensors
    have shapes but no values, and are not read from the file. Otherwise, the file's sums are checked: raises
    TrainerError for a file with a damaged block.
    """
    path = download.locate(weights)
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        what = f"--weights {weights}: no such file"
        hint = f"check the path; names that are downloaded: {download.RELEASED}"
        raise other_model("--weights", weights) or TrainerError(what, hint) from None
    except pickle.UnpicklingError:  # pickled objects: another trainer's, or invalid
        try:
            return cast(Checkpoint, {"format": FORMAT, **official.load(str(path))})
        except TrainerError as error:
            raise other_model("--weights", weights) or error from None
    except Exception as error:  # an unpickler can raise anything on arbitrary bytes
        raise _foreign(weights) from error
    if not isinstance(content, dict) or "format" not in content:
        raise _foreign(weights)
    if content["format"] != FORMAT:  # before its keys, which may be others
        what = (
            f"--weights {weights}: written by another version of this trainer, in format {content['format']}"
        )
        raise TrainerError(what, f"use that version; this one reads format {FORMAT}")
    if any(key not in content for key in KEYS):
        raise _foreign(weights)
    if device != "meta":
        _check_sums(path, weights)
    return cast(Checkpoint, content)


def _check_sums(path: str | Path, weights: str) -> None:
    """Raise TrainerError for a damaged file: a changed byte of a tensor is another weight, and torch does not notice.

    `weights` is the name of the file in the error.
    """
    try:
        torch_archive.check(path)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        what = f"--weights {weights}: the file is damaged: {error}"
        raise TrainerError(
            what, "copy it again; a run's folder has the checkpoint before it, previous.pt"
        ) from error


def is_resumable(content: Checkpoint) -> TypeGuard[RunCheckpoint]:
    """Return whether a run can be resumed from a checkpoint: best.pt has only weights, last.pt the whole state."""
    return "settings" in content


def resumed(resume: str, environment: Mapping[str, str] = os.environ) -> Checkpoint | None:
    """Return a checkpoint of the run that is resumed, by --resume or by a launcher's restart; None without one.

    A resumed run needs no --weights, and describes its model, whose file may have been moved.
    """
    restarts = environment.get(contract.ATTEMPT, "1") not in ("", "0", "1")
    for folder in (environment.get(contract.RUN_DIR, "") if restarts else "", resume):
        for name in (LAST, PREVIOUS) if folder else ():
            with contextlib.suppress(TrainerError):
                return load(str(Path(folder, name)))
    return None


def check_task(content: Checkpoint, task: str, weights: str, hint: str = "") -> None:
    """Raise TrainerError for a checkpoint of another task; `hint` replaces the default hint."""
    trained = content.get("task", "detect")
    if trained != task:
        what = f"--weights {weights}: trained with --task {trained}, not {task}"
        raise TrainerError(what, hint or f"use --task {trained}, or weights of a {task} model")


def _foreign(weights: str) -> TrainerError:
    if other := other_model("--weights", weights):
        return other
    hint = "give a best.pt or last.pt that one of them wrote"
    return TrainerError(
        f"--weights {weights}: not a checkpoint of this trainer, YOLOv5 or ultralytics, or damaged", hint
    )


def transfer(model: nn.Module, state: Mapping[str, torch.Tensor], where: str) -> tuple[int, int]:
    """Copy the tensors with equal shapes; return their number and the model's. Other class counts exclude the head."""
    own = model.state_dict()  # shares memory with the model
    fitting = [k for k, v in state.items() if k in own and own[k].shape == v.shape]
    if len(fitting) < len(own) / 2:
        what = f"--weights {where}: only {len(fitting)} of {len(own)} tensors fit this model"
        raise TrainerError(what, "use the --cfg that the checkpoint was trained with (leave --cfg out)")
    for key in fitting:  # not load_state_dict: torchvision's hooks need the file's version metadata
        own[key].copy_(state[key])
    return len(fitting), len(own)


def transfer_all(model: nn.Module, state: Mapping[str, torch.Tensor], where: str) -> None:
    """Copy all tensors of a model; raise TrainerError if one is missing or has another shape."""
    fit, of = transfer(model, state, where)
    if fit != of:
        what = f"--weights {where}: {of - fit} of the model's {of} tensors are missing"
        raise TrainerError(what, "take a best.pt or last.pt")
