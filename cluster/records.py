"""What is remembered of jobs: one JSON file each, written before the first side effect, replaced atomically."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from cluster.errors import ClusterError, UsageError
from cluster.model import NAME, Job, Mount, Node, Plan, Queue, Record, Step

Outcome = Literal["done", "failed", "stopped"]


class Records:
    """The records in one folder; by default the user's state folder (XDG), or `$CLUSTERCTL_STATE_DIR`."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_folder()

    def reserve(self, record: Record) -> None:
        """Write the record of a new job; raises UsageError when the name is taken, also by a launch at this moment."""
        path = self._path(record.plan.job_id)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("x")
        except FileExistsError:
            raise UsageError(
                f"a job {record.plan.job_id} exists already", "choose another --name, or see: clusterctl ps"
            ) from None
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            with file:
                file.write(_text(record))
        except OSError as error:
            path.unlink()  # half a record would be in the way of all others
            raise _unwritable(path, error) from error

    def update(self, record: Record) -> None:
        """Replace a job's record, but keep an end that is noted; ClusterError when its folder cannot be written to."""
        path = self._path(record.plan.job_id)
        with _lock(path.with_name(".lock")):
            if path.exists() and (noted := _load(path)).outcome:
                record = replace(record, outcome=noted.outcome, detail=noted.detail, exit_code=noted.exit_code)
            _replace(path, record)

    @contextmanager
    def watch(self, job_id: str) -> Iterator[bool]:
        """Be the one that restarts the job when it fails; gives False where another process is that already."""
        with _lock(self._path(job_id).with_suffix(".lock"), waits=False) as ours:
            yield ours

    def end(self, job_id: str, outcome: Outcome, detail: str = "", exit_code: int = 1) -> None:
        """Note how a job ended; the first end counts."""
        path = self._path(job_id)
        with _lock(path.with_name(".lock")):
            record = self.load(job_id)
            if not record.outcome:
                _replace(path, replace(record, outcome=outcome, detail=detail, exit_code=exit_code))

    def load(self, job_id: str) -> Record:
        """The record of one job; raises UsageError when there is none, naming those that are."""
        path = self._path(job_id) if NAME.fullmatch(job_id) else None
        if path is None or not path.exists():
            known = ", ".join(record.plan.job_id for record in self) or "none"
            raise UsageError(f"no job {job_id!r} (known: {known})", "clusterctl ps")
        return _load(path)

    def taken(self, job_id: str) -> bool:
        """Whether a job of this name is remembered."""
        return self._path(job_id).exists()

    def __iter__(self) -> Iterator[Record]:
        """All records, oldest first."""
        paths = sorted(self._folder.glob("*.json")) if self._folder.is_dir() else []
        yield from sorted((_load(path) for path in paths), key=lambda record: record.created_at)

    def _path(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.json"


def default_folder() -> Path:
    """`$CLUSTERCTL_STATE_DIR`, else `clusterctl/jobs` in the user's XDG state folder."""
    if given := os.environ.get("CLUSTERCTL_STATE_DIR"):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "clusterctl" / "jobs"


@contextmanager
def _lock(path: Path, *, waits: bool = True) -> Iterator[bool]:
    """Hold a lock file: a restart's new plan must not undo a stop. False where it `waits` not, and another has it."""
    ours = True
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(path.open("a"))
            fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            ours = False
        except OSError as error:
            raise _unwritable(path, error) from error
        yield ours


def _replace(path: Path, record: Record) -> None:
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        partial.write_text(_text(record))
        partial.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ClusterError:
    return ClusterError(
        f"cannot write the job's record {path}: {error.strerror}",
        "make room there, or keep the records elsewhere: CLUSTERCTL_STATE_DIR=FOLDER clusterctl ...",
    )


def _text(record: Record) -> str:
    return json.dumps(asdict(record), indent=1) + "\n"


def _load(path: Path) -> Record:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        plan, job = values.pop("plan"), values.pop("job")
        plan["steps"] = [Step(**_tuples(step)) for step in plan["steps"]]
        job["mounts"] = [Mount(**mount) for mount in job["mounts"]]
        for holder, fields in ((plan, ("nodes",)), (job, ("hosts", "spares")), (values, ("retired",))):
            for field in fields:
                holder[field] = [Node(**_tuples(node)) for node in holder[field]]
        if job.get("queue"):
            job["queue"] = Queue(Node(**_tuples(job["queue"]["login"])), job["queue"]["options"])
        return Record(plan=Plan(**_tuples(plan)), job=Job(**_tuples(job)), **_tuples(values))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(
            f"cannot read the job record {path}: {error}",
            f"if no other version of clusterctl has written it: mv {path} {path}.old",
        ) from error


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists where the nouns have tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
