"""Job store: one JSON file per job, written before the job starts and replaced atomically."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from cluster.errors import ClusterError, NameTakenError, UsageError, meant
from cluster.spec.model import NAME, JobRecord

if TYPE_CHECKING:
    import msgspec

Outcome = Literal["done", "failed", "stopped"]
#: How often, and with which pause in seconds, a taken lock is tried.
_TRIES = 3
_PAUSE_S = 0.02
#: How long a process that has locked a file may take to write into it who it is.
_NAMED_WITHIN_S = 1.0
#: How often the time is renewed at which a job was last seen in the same state.
_SEEN_S = 5.0


@dataclass(frozen=True)
class SupervisorProcess:
    """The process that supervises a job: its pid, its host, and whether it runs in the background.

    `pid` is None and `host` empty if the disk was too full to write them.
    """

    pid: int | None
    host: str
    in_background: bool

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}" if self.pid else "another process"

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return self.host == socket.gethostname()


@dataclass(frozen=True)
class Unreadable:
    """A record that cannot be read: its job, its path, and what to tell the user."""

    job_id: str
    path: Path
    error: ClusterError


@dataclass(frozen=True)
class Seen:
    """A job's state when its nodes last answered `at` a time, since when it had that state, and its nodes' phases."""

    state: str
    since: float
    at: float
    phases: Mapping[str, str]


class JobStore:
    """The job records in one folder (default: see `default_folder`)."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_folder()

    def reserve(self, record: JobRecord) -> None:
        """Write the record of a new job. Raise NameTakenError if the name is taken, also by a concurrent launch.

        The name of a job that has ended is free again once its run directory has been deleted.
        """
        job_id = record.plan.job_id
        path = self._path(job_id)
        with _lock(path.with_name(".lock")):
            self.refuse_taken(job_id)
            _replace(path, record)

    def refuse_taken(self, job_id: str) -> None:
        """Raise NameTakenError if the name is taken, with a hint on how to free it."""
        if not self.is_taken(job_id):
            return
        hint = "choose another name (--name NAME); to list all jobs: clusterctl ps --all"
        if self._has_lost_its_folder(self._path(job_id)):
            hint = f"its run directory is gone; to stop it and free its name: clusterctl stop {job_id}"
        raise NameTakenError(f"a job named {job_id} already exists", hint)

    def forget(self, job_id: str) -> None:
        """Remove the record of a job that has not started."""
        path = self._path(job_id)
        with _lock(path.with_name(".lock")):
            path.unlink(missing_ok=True)
            path.with_suffix(".seen").unlink(missing_ok=True)

    def update(self, record: JobRecord) -> None:
        """Replace a job's record, but keep a recorded outcome. Raise ClusterError if the folder is not writable."""
        path = self._path(record.plan.job_id)
        with _lock(path.with_name(".lock")):
            if _exists(path) and (stored := _load(path)).outcome:
                ending = {
                    name: getattr(stored, name)
                    for name in ("outcome", "detail", "exit_code", "ended_at", "stop_grace_s", "is_cleared")
                }
                record = replace(record, **ending)
            _replace(path, record)

    @contextmanager
    def supervise(self, job_id: str, *, in_background: bool = False) -> Iterator[bool]:
        """Become the job's supervisor, the only process that restarts it. Yield False if another process is."""
        with _lock(self._path(job_id).with_suffix(".lock"), blocking=False) as file:
            if file is None:
                yield False
                return
            with suppress(OSError):  # a full disk: only `supervisor_of` reads the text
                file.truncate(0)
                # Not file.write, whose buffer would fail again when the file is closed.
                os.write(
                    file.fileno(), f"{os.getpid()} {socket.gethostname()} {int(in_background)}\n".encode()
                )
            yield True

    def supervisor_of(self, job_id: str) -> SupervisorProcess | None:
        """Return the process that supervises the job, or None.

        A process writes who it is after it has locked the file: until then, the file is empty or names an earlier one.
        """
        until = time.monotonic() + _NAMED_WITHIN_S
        while (
            (supervisor := self._supervisor_of(job_id))
            and not _is_alive(supervisor)
            and time.monotonic() < until
        ):
            time.sleep(_PAUSE_S)
        return supervisor

    def _supervisor_of(self, job_id: str) -> SupervisorProcess | None:
        try:
            with self._path(job_id).with_suffix(".lock").open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    words = file.read().split()
                    if len(words) != 3 or not words[0].isdecimal():
                        return SupervisorProcess(None, "", in_background=False)
                    pid, host, in_background = words
                    return SupervisorProcess(int(pid), host, in_background == "1")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _unreadable_folder(self._folder, error) from error
        return None

    def end(
        self, job_id: str, outcome: Outcome, detail: str = "", exit_code: int = 1, *, grace_s: float = 0.0
    ) -> bool:
        """Record the outcome of a job. A recorded outcome does not change. Return whether none was recorded.

        `grace_s` is the grace of the stop, if the job was stopped.
        """
        path = self._path(job_id)
        with _lock(path.with_name(".lock")):
            record = self.load(job_id)
            if record.outcome:
                return False
            ended = replace(record, outcome=outcome, detail=detail, exit_code=exit_code, ended_at=time.time())
            _replace(path, replace(ended, stop_grace_s=grace_s))
        with suppress(OSError):
            path.with_suffix(".seen").unlink(missing_ok=True)
        return True

    def clear(self, launched: JobRecord) -> None:
        """Record that nothing of a job is left on its machines."""
        path = self._path(launched.plan.job_id)
        with _lock(path.with_name(".lock")):
            record = self.load(launched.plan.job_id)
            if record.job.launch_id == launched.job.launch_id and not record.is_cleared:
                _replace(path, replace(record, is_cleared=True))

    def see(self, record: JobRecord, state: str, phases: Mapping[str, str]) -> None:
        """Remember the state in which a job's nodes have just been seen, for the time when they do not answer.

        The time of a state that does not change is renewed every few seconds. Without space for it, nothing is kept.
        """
        last = self.seen(record)
        now = time.time()
        is_new = last is None or (last.state, last.phases) != (state, phases)
        if last is not None and not is_new and now - last.at < _SEEN_S:
            return
        path = self._path(record.plan.job_id).with_suffix(".seen")
        since = last.since if last is not None and last.state == state else now
        known = {
            "launch_id": record.job.launch_id,
            "state": state,
            "since": since,
            "at": now,
            "phases": dict(phases),
        }
        partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            partial.write_text(json.dumps(known) + "\n")
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def seen(self, record: JobRecord) -> Seen | None:
        """Return what `see` has kept of a job; None if nothing is known."""
        try:
            known = json.loads(self._path(record.plan.job_id).with_suffix(".seen").read_text())
            is_its = known["launch_id"] == record.job.launch_id
            found = Seen(
                str(known["state"]), float(known["since"]), float(known["at"]), dict(known["phases"])
            )
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return found if is_its else None

    def supervised(self) -> frozenset[str]:
        """Return the launch IDs of the jobs that a process on this machine follows and may restart at any moment."""
        return frozenset(
            record.job.launch_id
            for record in self
            if not record.outcome and self.supervisor_of(record.plan.job_id)
        )

    def load(self, job_id: str) -> JobRecord:
        """Return the record of a job. Raise UsageError with the names that are like it if there is none."""
        path = self._path(job_id) if NAME.fullmatch(job_id) else None
        if path is None or not _exists(path):
            question = meant(job_id, [record.plan.job_id for record in self])
            raise UsageError(
                f"no job {job_id!r}", f"{question} to list all jobs: clusterctl ps --all".strip()
            )
        return _load(path)

    def is_taken(self, job_id: str) -> bool:
        """Return whether a job of this name is recorded that has not ended, or that still has its run directory."""
        path = self._path(job_id)
        if not _exists(path):
            return False
        try:
            is_over = bool(_load(path).outcome)
        except ClusterError:  # it may be running
            return True
        return not is_over or not self._has_lost_its_folder(path)

    def _has_lost_its_folder(self, path: Path) -> bool:
        """Return whether the run directory of a recorded job has been deleted."""
        try:
            return not os.path.lexists(_load(path).plan.run_dir)
        except ClusterError:
            return False

    def __iter__(self) -> Iterator[JobRecord]:
        """Iterate over the records that can be read, oldest first: one that cannot must not stop the other jobs."""
        yield from self._read()[0]

    def unreadable(self) -> list[Unreadable]:
        """Return the records that cannot be read: damaged, or written by another version."""
        return self._read()[1]

    def _read(self) -> tuple[list[JobRecord], list[Unreadable]]:
        records: list[JobRecord] = []
        unreadable: list[Unreadable] = []
        for path in self._paths():
            try:
                records.append(_load(path))
            except ClusterError as error:
                if path.exists():  # not removed a moment ago
                    unreadable.append(Unreadable(path.stem, path, error))
        return sorted(records, key=lambda record: record.created_at), unreadable

    def _paths(self) -> list[Path]:
        """Return the paths of all records. Raise ClusterError if the folder cannot be read: glob would find none."""
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 (iterdir reads one entry at a time)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable_folder(self._folder, error) from error
        return sorted(self._folder / name for name in names if name.endswith(".json"))

    def _path(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.json"


def default_folder() -> Path:
    """Return `$CLUSTERCTL_STATE_DIR`, or else `clusterctl/jobs` in the user's XDG state folder.

    Raises UsageError if this user has no home folder.
    """
    if given := os.environ.get("CLUSTERCTL_STATE_DIR"):
        return Path(given)
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state, "clusterctl", "jobs")
    try:
        return Path.home() / ".local" / "state" / "clusterctl" / "jobs"
    except RuntimeError:
        why = f"HOME is not set, and user {os.getuid()} has no entry in the password database"
        hint = (
            "export HOME=FOLDER, or name a folder for the records of jobs: export CLUSTERCTL_STATE_DIR=FOLDER"
        )
        raise UsageError(f"there is no home folder: {why}", hint) from None


@contextmanager
def _lock(path: Path, *, blocking: bool = True) -> Iterator[IO[str] | None]:
    """Hold a lock file, and yield it. Yield None if another process holds it and `blocking` is False."""
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(path.open("a"))
            if blocking:
                fcntl.flock(file, fcntl.LOCK_EX)
            is_held = blocking or _try_lock(file)
        except OSError as error:
            raise _unwritable(path, error) from error
        yield file if is_held else None


def _is_alive(process: SupervisorProcess) -> bool:
    """Return whether a process of this machine is alive; one of another machine is taken to be."""
    if process.pid is None:
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return not process.is_here
    except PermissionError:  # another user's
        pass
    return True


def _try_lock(file: IO[str]) -> bool:
    """Lock a file, unless another process holds it. `supervisor_of` does for a moment, so this tries several times."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_PAUSE_S)
    return False


def _replace(path: Path, record: JobRecord) -> None:
    """Replace a record. After a power failure the file system has the old or the new one, never an empty file."""
    import msgspec

    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with partial.open("wb", buffering=0) as file:
            text = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
            while text:
                text = text[file.write(text) or 0 :]
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise _unwritable(path, error) from error


def _sync_folder(folder: Path) -> None:
    """Make the new name of a file durable, where the file system can do that for a folder."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(opened)
    finally:
        os.close(opened)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # for example without permission
        raise _unreadable_folder(path.parent, error) from error


def _unreadable_folder(folder: Path, error: OSError) -> ClusterError:
    return ClusterError(
        f"cannot read the records of jobs in {folder}: {error.strerror}",
        "give this user access, or use another folder: CLUSTERCTL_STATE_DIR=FOLDER clusterctl ...",
    )


def _unwritable(path: Path, error: OSError) -> ClusterError:
    return ClusterError(
        f"cannot write the job's record {path}: {error.strerror}",
        "free some space, or use another folder: CLUSTERCTL_STATE_DIR=FOLDER clusterctl ...",
    )


@functools.cache
def _decoder() -> msgspec.json.Decoder[JobRecord]:
    """Return the decoder of records. `--help` does without it; pydantic's would take 50 ms more to import and build."""
    import msgspec

    return msgspec.json.Decoder(JobRecord)


def _load(path: Path) -> JobRecord:
    try:
        stat = path.stat()
        return _parse(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError) as error:
        hint = f"use the version of clusterctl that launched the job, or remove it from the list: mv {path} {path}.old"
        raise ClusterError(f"cannot read the job record {path}: {_why(error)}", hint) from error


def _why(error: Exception) -> str:
    """Return the first reason, such as `plan: Object missing required field `nodes``."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    reason, _, key = str(error).splitlines()[0].partition(" - at `$.")
    return f"{key.rstrip('`')}: {reason}" if key else reason


@functools.lru_cache(maxsize=4096)  # `clusterctl serve` polls all jobs once per second
def _parse(path: Path, *_version: int) -> JobRecord:
    return _decoder().decode(path.read_bytes())
