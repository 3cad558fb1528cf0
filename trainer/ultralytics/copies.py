"""Copies of rank 0's checkpoints on every node, from which a restarted attempt resumes.

The package writes weights/last.pt and weights/best.pt on rank 0's machine alone, and not atomically. So after each
epoch every machine gets them as `last.pt` and `best.pt` in the run's folder, where the launcher expects checkpoints.
"""

import contextlib
import csv
import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.distributed import comm
from trainer.engine import checkpoints
from trainer.errors import TrainerError
from trainer.weights import checkpoint_file, download
from trainer.weights.official import MALFORMED

LAST = checkpoints.LAST
BEST = checkpoints.BEST


class Copies:
    """The copies in this machine's folder of the run. The machines that share a folder write one."""

    def __init__(self, folder: Path, world: comm.World) -> None:
        """A collective."""
        self.folder = folder
        self._world = world
        self._writes = checkpoints.is_writer(folder, world)
        self._writers = [rank for rank, writes in enumerate(comm.all_gather(self._writes)) if writes]
        # One rank per machine takes part, over gloo, so that no checkpoint passes through a GPU's memory.
        several = len(self._writers) > 1
        self._group: Any = (
            dist.new_group(self._writers, backend="gloo", timeout=comm.TIMEOUT) if several else None
        )
        self.last = folder / LAST
        self.best = folder / BEST
        self.epoch = -1  # of the newest copy, counted from 0

    def begin(self, *, resumes: bool) -> dict[str, Any] | None:
        """Return the header of the checkpoint to resume from; None for a new run, whose folder gets rid of old copies.

        If several machines have copies, all get the newest. A collective.
        """
        if self._writes:
            for path in self.folder.glob(".*.pt.*.tmp"):  # of a killed process
                path.unlink(missing_ok=True)
            if not resumes:
                self.remove()
        header = self._share(LAST) if resumes else None
        if header:
            self._share(BEST)
            self.epoch = header["epoch"]
        comm.barrier()
        return header

    def publish(self, weights: Path, epoch: int, *, is_best: bool) -> Path | None:
        """Write rank 0's `weights`, of `epoch` from 0, on all machines; return the path that this rank wrote.

        A collective of the writers: other ranks return at once.
        """
        self.epoch = epoch
        if not self._writes:
            return None
        content = weights.read_bytes() if self._world.rank == 0 else b""
        content, is_best = self._send((content, is_best))
        if is_best:  # first, so that there is no last.pt whose best epoch is missing
            _write(self.best, content)
        _write(self.last, content)
        return self.last

    def remove(self) -> None:
        """Remove this machine's copies."""
        if self._writes:
            self.last.unlink(missing_ok=True)
            self.best.unlink(missing_ok=True)

    def _share(self, name: str) -> dict[str, Any] | None:
        """Give the newest copy of any machine to those that lack it; return its header on all ranks. A collective."""
        path = self.folder / name
        mine = header_of(path) if self._writes else None
        epochs = comm.all_gather(mine["epoch"] if mine else -1)
        if max(epochs) < 0:
            if name == LAST and any(comm.all_gather(path.exists())):
                hint = "make it readable; to start a new run, move it away"
                raise TrainerError(f"{path}: cannot be read, or is not a checkpoint of Ultralytics", hint)
            return None
        source = epochs.index(max(epochs))
        header: dict[str, Any] = comm.broadcast(mine, source)
        if self._writes and len({epochs[rank] for rank in self._writers}) > 1:
            content = self._send(path.read_bytes() if self._world.rank == source else b"", source)
            if not mine or mine["epoch"] < header["epoch"]:
                _write(path, content)
        return header

    def _send(self, value: Any, source: int = 0) -> Any:
        """Return the value of the writer `source` on all writers."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=source, group=self._group)
        return values[0]


def restore(folder: Path, results: Path, header: Mapping[str, Any]) -> None:
    """Complete rank 0's run in `folder` before it is resumed: its weights, and the epochs in the table `results`.

    A kill may have damaged the weights, and the machine may be new. The table's rows of epochs that will be repeated
    are removed.
    """
    weights = folder / "weights"
    weights.mkdir(parents=True, exist_ok=True)
    for name in (LAST, BEST):
        if (folder / name).is_file():
            _write(weights / name, (folder / name).read_bytes())
    columns = header["train_results"]
    if results.is_file():
        names, *rows = list(csv.reader(results.read_text(encoding="utf-8").splitlines()))
    else:
        names = list(columns)
        rows = [list(map(str, row)) for row in zip(*columns.values(), strict=True)]
    kept = [row for row in rows if row and row[0].strip().isdecimal() and int(row[0]) <= header["epoch"] + 1]
    if kept:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([names, *kept])
        checkpoint_file.write_bytes(results, out.getvalue().encode())
    elif results.is_file():
        results.unlink()


def header_of(path: Path) -> dict[str, Any] | None:
    """Return `epoch` (done epochs - 1) and `train_results` (columns of results.csv) of a checkpoint of the package.

    None if the file is missing, damaged, or of a finished run, which cannot be resumed. Nothing in it is executed.
    """
    with contextlib.suppress(*MALFORMED), zipfile.ZipFile(path) as archive:
        if archive.testzip() is None:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            content = _Reader(io.BytesIO(archive.read(name))).load()
            if isinstance(content, dict) and type(content.get("epoch")) is int and content["epoch"] >= 0:
                return {"epoch": content["epoch"], "train_results": _table(content.get("train_results"))}
    return None


def _table(columns: Any) -> dict[str, list[Any]]:
    """Return the columns of results.csv in a checkpoint; {} if they are malformed, or the file had no table yet."""
    if not isinstance(columns, dict) or not all(isinstance(column, list) for column in columns.values()):
        return {}
    return (
        {str(name): column for name, column in columns.items()}
        if len(set(map(len, columns.values()))) == 1
        else {}
    )


class _Ignored:
    """Stands for every object of a checkpoint but plain data: it accepts what a pickle does with one."""

    def __new__(cls, *_: Any, **__: Any) -> "_Ignored":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "_Ignored":
        return self

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """Accept an item."""

    def extend(self, _: Any) -> None:
        """Accept items."""

    def add(self, _: Any) -> None:
        """Accept an item."""


class _Reader(pickle.Unpickler):
    """Reads the plain data of a checkpoint, without its classes, functions and tensors."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for any class."""
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Ignored

    def persistent_load(self, _: Any) -> Any:
        """Return the stand-in for a tensor's storage."""
        return _Ignored()


def _write(path: Path, content: bytes) -> None:
    """Write a checkpoint atomically, and to the disk: a reader sees the old or the new one, also after a power cut."""
    with download.replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
