"""Checkpoints of a run: writes last.pt and best.pt, finds the newest to resume from, checks its settings and data."""

import contextlib
import dataclasses
import itertools
import os
import secrets
import sys
from pathlib import Path

from trainer import contract
from trainer.config import Hyp, ModelCfg, Settings
from trainer.config.settings import option_of
from trainer.distributed import comm
from trainer.errors import TrainerError
from trainer.weights import checkpoint_file
from trainer.weights.checkpoint import BestCheckpoint, RunCheckpoint, RunState

LAST = checkpoint_file.LAST
PREVIOUS = checkpoint_file.PREVIOUS
BEST = "best.pt"
# Settings of the machine, which are not taken from the checkpoint.
_PLACEMENT = {
    *("resume", "device", "parallel", "stages", "micro_batches"),
    *("workers", "cache", "project", "name", "exist_ok"),
}
# Settings that may differ between the machines of a job.
_PER_MACHINE = {"data", "cfg", "weights", "device", "workers", "project", "name", "callback"}
# Settings that may change on resume, because they do not affect the results. `data` may have moved; its fingerprint
# is checked.
FREE = {
    *_PLACEMENT,
    *("data", "callback", "patience", "val_period", "save_every", "save_period"),
    *("stall_timeout", "log_steps", "track", "on_nan", "allow_bad_labels"),
}


def write(folder: Path, content: RunState) -> Path:
    """Write last.pt, and keep the old one as previous.pt in case of a torn write."""
    last = folder / LAST
    numbered: RunCheckpoint = {**content, "attempt": int(os.environ.get(contract.ATTEMPT) or 1)}
    checkpoint_file.save(last, numbered, previous=folder / PREVIOUS)
    return last


def write_best(folder: Path, content: RunState) -> None:
    """Write best.pt: of a checkpoint's content, the averaged weights, their scores, and what is needed to use them.

    These are what the scores belong to and what people share. The optimizer's state and a second copy of the weights
    would make the file three or four times as large. The settings are left out, as they name paths of this machine.
    """
    best: BestCheckpoint = {
        "format": content["format"],
        "ema": content["ema"],
        "epoch": content["epoch"],
        "hyp": content["hyp"],
        "cfg": content["cfg"],
        "names": content["names"],
        "imgsz": content["imgsz"],
        "task": content["task"],
        "scores": content["at"]["best_scores"],
    }
    checkpoint_file.save(folder / BEST, best)


def newest(folder: Path) -> tuple[RunCheckpoint | None, list[str]]:
    """Return the newest readable checkpoint of a folder, or None, and what is wrong with newer ones."""
    wrong: list[str] = []
    for path, _ in _newest_first(folder, wrong):
        try:
            content = checkpoint_file.load(str(path))
        except TrainerError as error:  # its tensors cannot be read
            wrong.append(error.message.removeprefix("--weights "))
            continue
        if checkpoint_file.is_resumable(content):
            return content, wrong
    return None, wrong


def _newest_first(folder: Path, wrong: list[str] | None = None) -> list[tuple[Path, RunCheckpoint]]:
    """Return a folder's readable checkpoints of a run without the values of their tensors, the newest first.

    Append to `wrong` why a last.pt that exists gives way to previous.pt: it may be truncated.
    """
    checkpoints: list[tuple[Path, RunCheckpoint]] = []
    for path in (folder / LAST, folder / PREVIOUS):
        try:
            content = checkpoint_file.load(str(path), device="meta")
        except TrainerError as error:
            if wrong is not None and path.name == LAST and path.exists():
                wrong.append(error.message.removeprefix("--weights "))
            continue
        if checkpoint_file.is_resumable(content):
            checkpoints.append((path, content))
    return sorted(checkpoints, key=lambda checkpoint: progress_of(checkpoint[1]), reverse=True)


def progress_of(content: RunCheckpoint) -> tuple[int, int, int]:
    """Return a sort key of a run's checkpoints: the later one is greater, and equal keys mean equal contents.

    An epoch's last step has two checkpoints, before and after its validation. An attempt without the checkpoints of
    another node may have repeated a step, on another number of ranks.
    """
    return content["step"], content["epoch"], content.get("attempt", 1)


def find(path: str, project: str) -> Path:
    """Return the folder of `--resume PATH`: a checkpoint's, the folder itself, or the newest in `project` ("last")."""
    if path == "last":
        files = [*Path(project).glob(f"*/{PREVIOUS}"), *Path(project).glob(f"*/{LAST}")]
        if not files:
            raise TrainerError(
                f"--resume: no {LAST} in any folder of {project}", f"give its path: --resume .../{LAST}"
            )
        return max(files, key=lambda file: file.stat().st_mtime).parent
    folder = Path(path)
    if folder.suffix == ".pt":
        if folder.name not in (LAST, PREVIOUS):
            _check_resumable(folder)
            raise TrainerError(
                f"--resume {path}: a run is resumed from its {LAST}",
                f"move it to {LAST} in a new folder, or start a new run from its weights: --weights {path}",
            )
        folder = folder.parent
    if not any((folder / name).is_file() for name in (LAST, PREVIOUS)):
        if (folder / BEST).is_file():
            raise TrainerError(
                f"--resume {path}: no {LAST}, and {BEST} has only weights",
                f"restore {LAST}, or start a new run from these weights: --weights {folder / BEST}",
            )
        raise TrainerError(f"--resume {path}: no checkpoint found", f"give a run's folder or its {LAST}")
    return folder


def _check_resumable(path: Path) -> None:
    """Raise TrainerError if a checkpoint has only weights; pass if it has more, or cannot be read."""
    content = None
    with contextlib.suppress(TrainerError):
        content = checkpoint_file.load(str(path), device="meta")
    if content and not checkpoint_file.is_resumable(content):
        what = f"--resume {path}: it has only weights, without the optimizer's state"
        raise TrainerError(
            what, f"resume from {LAST}, or start a new run from these weights: --weights {path}"
        )


def settings_of(typed_settings: Settings, typed: frozenset[str]) -> Settings:
    """Return the settings of the run of `typed_settings.resume`; `typed` are the names of the options given.

    Settings that were not typed are that run's, except those of the machine. Raise TrainerError if a typed one differs
    and would affect the results.
    """
    folder = find(typed_settings.resume, typed_settings.project)
    checkpoints = _newest_first(folder)
    if not checkpoints:
        for name in (LAST, PREVIOUS):
            _check_resumable(folder / name)
        raise TrainerError(
            f"--resume {folder}: no readable checkpoint", "start without --resume, or from --weights"
        )
    _, newest_content = checkpoints[0]
    saved = newest_content["settings"]
    for name in sorted((typed & saved.keys()) - FREE):
        _compare(name, dataclasses.asdict(typed_settings)[name], saved[name])
    not_taken = _PLACEMENT | (typed & FREE)
    taken = {name: value for name, value in saved.items() if name not in not_taken}
    return dataclasses.replace(typed_settings, **taken, resume=str(folder))


def check_same(content: RunCheckpoint, settings: Settings, data: str, cfg: ModelCfg) -> None:
    """Raise TrainerError if the checkpoint has other settings, fingerprint of the data set `data`, or model `cfg`."""
    if content.get("data", data) != data:
        raise TrainerError(
            f"--data {settings.data} has other images or labels than when the checkpoint was written",
            "restore them, or start a new run from its weights with --weights",
        )
    saved = dict(content["settings"])
    now = dataclasses.asdict(settings)
    if isinstance(saved.get("hyp"), dict):
        # The checkpoint may be of a version with fewer hyper-parameters.
        saved["hyp"] = {**dataclasses.asdict(Hyp()), **saved["hyp"]}
    for name in sorted(saved.keys() & now.keys() - FREE - _PER_MACHINE):
        _compare(name, now[name], saved[name])
    fitted = {"anchors": None}  # the checkpoint's may be fitted to the data set
    if {**cfg, **fitted} != {**content["cfg"], **fitted}:
        model = settings.cfg or settings.weights or "the default --cfg"
        raise TrainerError(
            f"{model} describes another model than when the checkpoint was written",
            "restore it, or start a new run from its weights with --weights",
        )


def _compare(name: str, now: object, before: object) -> None:
    if now != before:
        option = option_of(name)
        raise TrainerError(
            f"{option} {_short(now, before)}: the checkpoint was written with {_short(before, now)}",
            f"resume with the same {option}, or start a new run from its weights with --weights",
        )


def _short(value: object, other: object) -> str:
    """Format a value; of a dict, the items that differ from `other`."""
    if isinstance(value, dict) and isinstance(other, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items() if other.get(k) != v)
    return str(value)


def check_same_everywhere(settings: Settings) -> None:
    """Raise TrainerError on all ranks if a rank's settings differ from rank 0's. A collective."""
    mine = {k: v for k, v in dataclasses.asdict(settings).items() if k not in _PER_MACHINE}
    mine["resume"] = bool(settings.resume)  # the folder's path may differ between machines
    first, *others = comm.all_gather(mine)
    for rank, other in enumerate(others, 1):
        for name, theirs in other.items():
            if theirs != first[name]:
                raise TrainerError(
                    f"{option_of(name)} is {_short(first[name], theirs)} on rank 0 and {_short(theirs, first[name])} "
                    f"on rank {rank}",
                    f"give the same {option_of(name)} on every machine",
                )


def set_aside(folder: Path) -> str:
    """Rename another run's newest and best checkpoints, so that this run does not replace them; return a new name.

    The names are before.pt and before-best.pt, or the first free of before2.pt, before3.pt, ... Return "" if there are
    none.
    """
    existing = [folder / name for name in (PREVIOUS, LAST) if (folder / name).exists()]
    best = folder / BEST
    if not existing and not best.is_file():
        return ""
    name = _free_name(folder)
    if best.is_file():
        best.replace(folder / f"{name}-{BEST}")
    for path in existing:  # the newer one last, which replaces the other
        path.replace(folder / f"{name}.pt")
    return f"{name}.pt" if existing else f"{name}-{BEST}"


def _free_name(folder: Path) -> str:
    """Return the first of before, before2, ... that no checkpoint has."""
    for number in itertools.count(1):
        name = f"before{number if number > 1 else ''}"
        is_taken = any(folder.glob(f"{name}.pt")) or any(folder.glob(f"{name}-*.pt"))
        if not is_taken:
            return name
    raise AssertionError  # never: `count` does not end


def is_writer(folder: Path, world: comm.World) -> bool:
    """Return whether this process writes the checkpoints of `folder`. A collective.

    Of the machines that share the folder, the first rank writes. Each machine's first rank creates a file there, and
    then lists the files of the others.
    """
    token = comm.broadcast(secrets.token_hex(4))
    is_first = world.local_rank == 0
    firsts = [rank for rank, first in enumerate(comm.all_gather(is_first)) if first]
    marks = {rank: folder / f".common-{token}-{rank}" for rank in firsts}
    if is_first:
        marks[world.rank].touch()
    comm.barrier()
    writer = next((rank for rank, mark in marks.items() if mark.exists()), None)
    comm.barrier()
    if is_first:
        marks[world.rank].unlink(missing_ok=True)
    return world.rank == writer


def newest_of_all(folder: Path) -> RunCheckpoint | None:
    """Return the newest checkpoint that any rank can read, on every rank; None if no rank has one. A collective.

    Without a shared disk each node has its own copy, and a replaced node gets it from another. A damaged checkpoint is
    named on rank 0.
    """
    mine, wrong = newest(folder)
    damaged = dict.fromkeys(itertools.chain.from_iterable(comm.all_gather(wrong)))
    if comm.is_rank_zero():
        for line in damaged:
            print(f"warning: {line}; this checkpoint is skipped", file=sys.stderr, flush=True)
    progresses = comm.all_gather(progress_of(mine) if mine else ())
    furthest = max(progresses)
    has_files = any((folder / name).exists() for name in (LAST, PREVIOUS))
    if not furthest and any(comm.all_gather(has_files)):
        raise TrainerError(
            f"{folder}: its {LAST} and {PREVIOUS} cannot be read, or are not from this trainer",
            "make them readable; to start a new run, move them away",
        )
    if min(progresses) == furthest:
        return mine
    return comm.broadcast(mine, source=progresses.index(furthest))  # type: ignore[no-any-return]


def share_best(path: Path, epoch: int, writes: bool) -> None:
    """Copy best.pt, the weights after `epoch` (from 1), to the writers that lack it. A collective."""
    if not comm.is_distributed():
        return
    mine = None
    with contextlib.suppress(TrainerError):
        mine = checkpoint_file.load(str(path), device="meta")["epoch"]
    epochs = comm.all_gather(mine)
    lacks = writes and mine != epoch
    if epoch in epochs and any(comm.all_gather(lacks)):
        source = epochs.index(epoch)
        content = comm.broadcast(path.read_bytes() if mine == epoch else None, source)
        if lacks:
            checkpoint_file.write_bytes(path, content)


def discard_after(path: Path, number: int) -> None:
    """Remove the rows after step `number` from a table of steps, because the run repeats them."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    header = lines[:1]
    kept = [line for line in lines[1:] if int(line.split(",")[0]) <= number]
    checkpoint_file.write_bytes(path, "".join([*header, *kept]).encode())
