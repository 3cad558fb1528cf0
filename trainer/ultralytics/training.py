"""A training with the package on this rank, from the words of the command line to its end."""

import contextlib
import importlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer import contract
from trainer.distributed import comm, neighbours
from trainer.engine.events import Events
from trainer.engine.heartbeats import texts_of
from trainer.engine.watchdog import Watchdog
from trainer.errors import TrainerError
from trainer.ultralytics import copies, data, package
from trainer.ultralytics.arguments import TASKS, check_batch, device_text, wanted_device
from trainer.ultralytics.ranks import hide_single_rank, on_all_ranks
from trainer.ultralytics.reports import SCORES, Reports
from trainer.ultralytics.session import TIMEOUT, Session
from trainer.weights import checkpoint_file

#: The package draws plots and closes its dataloaders without a callback, so this is longer than our own trainer's.
STALL_S = 300.0


def train(words: Sequence[str], launched_device: str) -> None:
    """Train with the package; `words` are those after `yolo`, `launched_device` is the launcher's --device or "".

    Raise TrainerError for invalid input, Stopped after a signal.
    """
    begin = time.monotonic()
    version = package.check_version()
    world = comm.world_of(os.environ)
    ranks_here = world.local_size if world.launched else 0
    if world.size == 1:
        hide_single_rank()
        world = replace(world, launched=False)
    words = _absolute(words)
    package.load()
    task, values, resolved = package.read_arguments(words)
    check_batch(resolved.batch, world.size)
    if not resolved.data and not resolved.resume:
        raise TrainerError("data= is missing", "give the path of a data.yaml, or a name: data=coco8.yaml")
    under_launcher = contract.RUN_DIR in os.environ
    if resolved.resume and (under_launcher or world.size > 1):
        hint = "omit resume, because a restart resumes by itself; a new run can start from its weights: model=.../last.pt"
        raise TrainerError("resume continues a run on one machine, not a launched job", hint)
    device = _device(wanted_device(device_text(resolved.device), launched_device, ranks_here), world)
    events = Events(os.environ)
    with comm.rendezvous_errors(world, device, TIMEOUT):
        backend = comm.join(world, device, TIMEOUT)
        _check_data(str(resolved.data or ""))
    events.emit(
        contract.READY, rank=world.rank, world_size=world.size, backend=backend or "none", device=device.type
    )

    session = Session(world, device, events, str(resolved.data or ""), store=comm.connect_store())
    header = None
    if under_launcher:
        session.folder = _run_folder()
        session.copies = copies.Copies(session.folder, world)
        header = session.copies.begin(resumes=os.environ.get(contract.ATTEMPT, "1") not in ("", "0", "1"))
        _note_ignored(values, world)
    if header and session.folder and world.rank == 0:
        copies.restore(session.folder, session.folder / "results.csv", header)
    near = neighbours.find(world, texts_of(world.size))
    session.watchdog = Watchdog(world, STALL_S, events, session.store, near)
    with session.signals.handled():
        with session.watchdog:
            model = _load(task, values, session, resumes=bool(header))
            reports = Reports(session, model.task)
            reports.add_to(model)
            if world.rank == 0:
                _print_start(version, session, backend)
            trainer = on_all_ranks(model._smart_load("trainer"), session)
            with _refusals(reports):
                model.train(trainer=trainer, **_options(values, device, resumes=bool(header)))
        comm.barrier()  # rank 0 hosts the store, and may exit once no heartbeat uses it
        if world.rank == 0:
            best = str(model.trainer.save_dir / "weights" / "best.pt")
            scores = reports.scores or dict.fromkeys(SCORES[model.task].values(), float("nan"))
            events.emit(contract.DONE, seconds=time.monotonic() - begin, **scores, best=best)
        if session.copies:
            session.copies.remove()  # weights/ has them now, without what resuming needs
        comm.leave()


def _absolute(words: Sequence[str]) -> list[str]:
    """Return the words with absolute paths of input files and folders that exist: the current folder may change."""
    found = []
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        is_path = f"{name}=" in contract.INPUT_OPTIONS and Path(value).exists()
        found.append(f"{name}={os.path.abspath(value)}" if is_path else word)  # noqa: PTH100 (follows no links)
    return found


def _device(wanted: str, world: comm.World) -> torch.device:
    try:
        device = comm.pick_device(wanted, world)
    except TrainerError as error:
        message, hint = (text.replace("--device ", "device=") for text in (error.message, error.hint))
        raise TrainerError(message, hint) from None
    if device.type == "cpu":
        comm.limit_threads(world, device)
    return device


def _check_data(value: str) -> None:
    """Raise TrainerError on all ranks if the dataset is not on the node of one of them. A collective."""
    error = None
    try:
        data.check(value)
    except TrainerError as found:
        error = found
    comm.raise_on_all_ranks(error)


def _run_folder() -> Path:
    """Return the launcher's folder on this node; an error stops all ranks. A collective."""
    folder = Path()
    error = None
    try:
        folder = checkpoint_file.make_run_dir(os.environ, "", "", False)
    except TrainerError as found:
        error = found
    comm.raise_on_all_ranks(error)
    return folder


def _note_ignored(values: dict[str, Any], world: comm.World) -> None:
    ignored = [f"{name}=" for name in ("project", "name", "exist_ok", "save_dir") if name in values]
    if ignored and world.rank == 0:
        print(f"{' '.join(ignored)} not used: the job has its own folder", flush=True)


def _load(task: str, values: dict[str, Any], session: Session, *, resumes: bool) -> Any:
    """Return the package's model on all ranks: the first rank downloads what the others then find. A collective."""
    if resumes and session.copies:
        return _open_model(str(session.copies.last), "")
    defaults = importlib.import_module("ultralytics.cfg").TASK2MODEL
    name = str(values.get("model") or defaults[task or TASKS[0]])
    world = session.world
    model = None
    turns = (0, 1, 2)
    mine = 0 if world.rank == 0 else 1 if world.local_rank == 0 else 2
    for turn in turns:  # rank 0, the first ranks of other nodes, the others
        error = None
        if turn == mine:
            try:
                model = _open_model(name, task)
            except TrainerError as found:
                error = found
        comm.raise_on_all_ranks(error)
    return model


def _open_model(name: str, task: str) -> Any:
    """Return the package's model for a file or name. Raise TrainerError if there is none, or it is not trained."""
    ultralytics = importlib.import_module("ultralytics")
    try:
        # As the package's own command line guesses it.
        is_rtdetr = "rtdetr" in Path(name).stem.lower()
        model = ultralytics.RTDETR(name) if is_rtdetr else ultralytics.YOLO(name, task=task or None)
    except (
        OSError,
        ValueError,
        TypeError,
        SyntaxError,
        RuntimeError,
        NotImplementedError,
        LookupError,
    ) as error:
        hint = "give a .pt or .yaml file, or a name that can be downloaded here: model=yolo26n.pt"
        raise TrainerError(f"model={name}: {package.first_line(error)}", hint) from None
    if type(model) not in (ultralytics.YOLO, ultralytics.RTDETR) or model.task not in TASKS:
        what = f"model={name}: a {type(model).__name__} for the task {model.task}"
        raise TrainerError(f"{what} is not trained on several machines", "use a YOLO or RT-DETR model")
    if str(name).endswith((".yaml", ".yml", ".pt")):
        return model
    hint = "give a .pt or .yaml file"
    raise TrainerError(f"model={name}: an exported model cannot be trained", hint)


@contextlib.contextmanager
def _refusals(reports: Reports) -> Iterator[None]:
    """Turn errors by which the package refuses an argument, before the first epoch, into TrainerError."""
    try:
        yield
    except (NotImplementedError, ValueError, AssertionError) as error:
        if reports.has_begun:
            raise
        hint = "change that argument; the arguments and their values: yolo cfg"
        raise TrainerError(f"yolo: {package.first_line(error)}", hint) from None


def _options(values: dict[str, Any], device: torch.device, *, resumes: bool) -> dict[str, Any]:
    """Return the arguments of the package's `train`."""
    options = {name: value for name, value in values.items() if name not in ("model", "device", "save_dir")}
    if device.type == "cpu":
        # Only rank 0 finds out that a CPU has no mixed precision, and 8.3 does not tell the others.
        options["amp"] = False
    return {
        **options,
        "device": "cpu" if device.type == "cpu" else device,
        **({"resume": True} if resumes else {}),
    }


def _print_start(version: str, session: Session, backend: str) -> None:
    size = session.world.size
    ranks = f"{size} ranks over {backend}" if size > 1 else "1 process"
    newer = tuple(map(int, version.split(".")[:3])) > tuple(map(int, package.TESTED[-1].split(".")))
    tested = f" (newer than the tested {package.TESTED[-1]})" if newer else ""
    print(f"ultralytics {version}{tested}: {ranks} on {session.device.type}", flush=True)
