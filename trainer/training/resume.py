"""Which checkpoint a run goes on from, and what must be the same for it to go on exactly."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer import contract, dist
from trainer.config import Hyp, Settings
from trainer.errors import TrainerError
from trainer.weights import checkpoint

LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"
# Where a run computes and writes, which its next start says anew: another machine has other GPUs and folders.
_PLACE = {"resume", "device", "parallel", "stages", "micro_batches", "workers", "cache", "project", "name", "exist_ok"}
# What each machine of one job may have its own of.
_OF_A_MACHINE = {"data", "cfg", "weights", "device", "workers", "project", "name", "callback"}
# What may differ when a run goes on: none of these changes a number that is computed. That `data`, which may have been
# moved, is the same set is looked at by itself.
FREE = frozenset(
    {
        *_PLACE,
        *("data", "callback", "patience", "val_period", "save_every", "save_period", "stall_s", "log_steps", "on_nan"),
        "allow_bad_labels",
    }
)


def write(folder: Path, content: dict[str, Any]) -> Path:
    """Write last.pt; the one before it becomes previous.pt, so that a torn write costs nothing but a few steps."""
    last = folder / LAST
    attempt = int(os.environ.get(contract.ATTEMPT) or 1)
    checkpoint.save(last, {**content, "attempt": attempt}, previous=folder / PREVIOUS)
    return last


def newest(folder: Path) -> dict[str, Any] | None:
    """The newest complete checkpoint of a folder; one that cannot be read gives way to the one before it."""
    found: dict[str, Any] | None = None
    for name in (LAST, PREVIOUS):
        with contextlib.suppress(TrainerError):
            content = checkpoint.load(str(folder / name))
            if "settings" not in content:  # weights alone, or of another program
                continue
            if found is None or place(content) > place(found):
                found = content
    return found


def place(content: Mapping[str, Any]) -> tuple[int, int, int]:
    """Where a checkpoint of a run stands: the later of two is greater, and of one place there is one content.

    An epoch's last step has two checkpoints, before its validation and after it. An attempt that did not see those of
    another node may have made a step once more, on another number of ranks.
    """
    return content["step"], content["epoch"], content.get("attempt", 1)


def asked(resume: str, environment: Mapping[str, str]) -> bool:
    """Whether to look for a checkpoint: --resume, or a launcher that starts the job for a second time."""
    return bool(resume) or environment.get(contract.ATTEMPT, "1") not in ("", "0", "1")


def find(path: str, project: str) -> Path:
    """The folder that `--resume PATH` means: of a checkpoint, a folder itself, or the newest in `project` ("last")."""
    if path == "last":
        found = [p for name in (PREVIOUS, LAST) for p in Path(project).glob(f"*/{name}")]
        if not found:
            raise TrainerError(
                f"--resume: no {LAST} in any folder of {project}", "name it: --resume runs/train/last.pt"
            )
        return max(found, key=lambda path: path.stat().st_mtime).parent
    folder = Path(path)
    if folder.suffix == ".pt":
        if folder.name not in (LAST, PREVIOUS):
            raise TrainerError(
                f"--resume {path}: a run goes on from its {LAST}",
                f"rename it to {LAST} in a folder of its own; or start anew from its weights: --weights {path}",
            )
        folder = folder.parent
    if not any((folder / name).is_file() for name in (LAST, PREVIOUS)):
        raise TrainerError(f"--resume {path}: no checkpoint there", f"give a run's folder or its {LAST}")
    return folder


def settings_of(given: Settings, typed: frozenset[str]) -> Settings:
    """The settings of the run that `given.resume` names; `typed` are those that the user has typed this time.

    What was not typed is that run's, but for where it computes and writes. A typed one that differs and would change
    the training is an error: the run would not go on, it would be another.
    """
    folder = find(given.resume, given.project)
    content = newest(folder)
    if not content:
        raise TrainerError(f"--resume {folder}: its checkpoints cannot be read", "start anew, or from --weights")
    saved = content["settings"]
    names = {f.name for f in dataclasses.fields(Settings)}
    anew = {*_PLACE, *(typed & FREE), "hyp"}
    values = {k: v for k, v in saved.items() if k in names - anew}
    kept = dataclasses.replace(given, **values, hyp=Hyp(**saved["hyp"]), resume=str(folder))
    for name in sorted((typed & names) - FREE):
        _compare(name, dataclasses.asdict(given)[name], saved.get(name))
    return kept


def check_same(content: Mapping[str, Any], settings: Settings, data: str) -> None:
    """An error where the run was told other things than the checkpoint's, or has another set of pictures, by `data`."""
    if content.get("data", data) != data:
        raise TrainerError(
            f"--data {settings.data} is not as it was when the checkpoint was written: other pictures or boxes",
            "bring them back, or start anew from its weights with --weights",
        )
    saved, now = content["settings"], dataclasses.asdict(settings)
    for name in sorted(saved.keys() & now.keys() - FREE - _OF_A_MACHINE):
        _compare(name, now[name], saved[name])


def _compare(name: str, now: Any, before: Any) -> None:
    if now != before:
        option = _option(name)
        raise TrainerError(
            f"{option} is {_short(now, before)}, the checkpoint was made with {_short(before, now)}",
            f"go on with the same {option}, or start anew from its weights with --weights",
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _short(value: Any, other: Any) -> str:
    """The value; of a dict only what differs."""
    if isinstance(value, dict) and isinstance(other, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items() if other.get(k) != v)
    return str(value)


def check_same_everywhere(settings: Settings) -> None:
    """An error on all ranks where one was told other things than rank 0, or goes on with other ones. A collective."""
    mine = {k: v for k, v in dataclasses.asdict(settings).items() if k not in _OF_A_MACHINE}
    mine["resume"] = bool(settings.resume)  # each machine may have its folder elsewhere
    first, *others = dist.all_gather(mine)
    for rank, other in enumerate(others, 1):
        for name, theirs in other.items():
            if theirs != first[name]:
                raise TrainerError(
                    f"{_option(name)} is {_short(first[name], theirs)} on rank 0 and {_short(theirs, first[name])} "
                    f"on rank {rank}",
                    f"type the same {_option(name)} on every machine",
                )


def set_aside(folder: Path) -> str:
    """Keep another run's newest checkpoint, which would be gone on from, and its best one; gives the first one's name.

    They become before.pt and before-best.pt, or the first of before2.pt, before3.pt, ... that is free.
    """
    there = [folder / name for name in (PREVIOUS, LAST) if (folder / name).exists()]
    if not there:
        return ""
    names = itertools.chain(["before"], (f"before{number}" for number in itertools.count(2)))
    name = next(name for name in names if not any(folder.glob(f"{name}.pt")) and not any(folder.glob(f"{name}-*.pt")))
    with contextlib.suppress(FileNotFoundError):
        (folder / BEST).replace(folder / f"{name}-{BEST}")
    for path in there:  # the newer one last
        path.replace(folder / f"{name}.pt")
    return f"{name}.pt"


def discard_unfinished(folder: Path) -> None:
    """Remove what a process that was killed has left half written."""
    for pattern in (".*.pt.*.tmp", ".common-*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def is_writer(folder: Path, world: dist.World) -> bool:
    """Whether this process writes the checkpoints of `folder`: the first rank of those machines that have it in common.

    Each machine's first rank puts a file there, and looks whose it finds. A collective.
    """
    token = dist.broadcast(secrets.token_hex(4))
    is_first = world.local_rank == 0
    firsts = [rank for rank, first in enumerate(dist.all_gather(is_first)) if first]
    marks = {rank: folder / f".common-{token}-{rank}" for rank in firsts}
    if is_first:
        marks[world.rank].touch()
    dist.barrier()
    writer = next((rank for rank, mark in marks.items() if mark.exists()), None)
    dist.barrier()
    if is_first:
        marks[world.rank].unlink(missing_ok=True)
    return world.rank == writer


def newest_of_all(folder: Path) -> dict[str, Any] | None:
    """The newest complete checkpoint that any rank can read, on every rank; None if there is none, readable or not.

    Where the nodes have no common disk, each keeps its own copy: a node that was replaced gets it from another.
    """
    mine = newest(folder)
    places = dist.all_gather(place(mine) if mine else ())
    if not max(places) and dist.any_rank(any((folder / name).exists() for name in (LAST, PREVIOUS))):
        raise TrainerError(
            f"{folder}: its {LAST} and {PREVIOUS} cannot be read, or are not of this trainer",
            "make them readable; to begin anew, move them away",
        )
    if min(places) == max(places):
        return mine
    return dist.broadcast(mine, source=places.index(max(places)))  # type: ignore[no-any-return]


def share_best(path: Path, best_epoch: int, writes: bool) -> None:
    """Give the checkpoint of the best epoch to those that write but lack it or have that of another. A collective."""
    if not dist.together():
        return
    mine = None
    with contextlib.suppress(TrainerError):
        mine = checkpoint.load(str(path)).get("at", {}).get("best_epoch")
    has = dist.all_gather(mine)
    lacks = writes and mine != best_epoch
    if best_epoch in has and any(dist.all_gather(lacks)):
        source = has.index(best_epoch)
        content = dist.broadcast(path.read_bytes() if mine == best_epoch else None, source)
        if lacks:
            checkpoint.write_bytes(path, content)


def bring_best(source: Path, folder: Path) -> None:
    """Copy the best checkpoint of a run to the folder in which it goes on; where there is none, another node has it."""
    with contextlib.suppress(FileNotFoundError):
        checkpoint.write_bytes(folder / BEST, (source / BEST).read_bytes())


def discard_after(path: Path, number: int) -> None:
    """Cut the rows whose first column is above `number` off a table of steps: they will be run again."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return
    kept = [line for k, line in enumerate(lines) if not k or int(line.split(",")[0]) <= number]
    checkpoint.write_bytes(path, "".join(kept).encode())
