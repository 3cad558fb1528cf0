"""Polling of jobs while pages show them: one thread per page, for any number of browsers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

from cluster.errors import ClusterError
from cluster.spec.model import JobRecord
from cluster.store import JobStore
from cluster.supervisor import job_monitor, job_state, job_status, page
from cluster.supervisor.job_state import JobView
from cluster.supervisor.job_status import JobStatus
from cluster.supervisor.report import seconds
from cluster.transport import inside

POLL_S = 1.0
#: Lines of a log, or of a search in it, that the page shows at first.
_LOG_LINES = 2000
#: Samples of the ranks that the page draws. Those before a longer pause of the polls are not drawn.
_SAMPLES = 60
_PAUSE_S = 10.0


class LivePage:
    """Polls in a thread while someone reads: `with page:`, then `wait`."""

    def __init__(self, poll: Callable[[], Markup]) -> None:
        self._poll = poll
        self._changed = threading.Condition()
        self._readers = 0
        self._thread = threading.Thread()
        self.version = 0
        self.body = Markup("")

    def __enter__(self) -> LivePage:
        """Start to poll, unless another reader did."""
        with self._changed:
            self._readers += 1
            if not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop after the last reader."""
        with self._changed:
            self._readers -= 1
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            try:
                body = self._poll()
            # A thread that just ends would leave the page as it is, without a word.
            except Exception as error:
                body = Markup('<section class="failed">{}</section>').format(_words(error))
            with self._changed:
                if body != self.body or not self.version:
                    self.body = body
                    self.version = self.version + 1
                    self._changed.notify_all()
                self._changed.wait_for(lambda: not self._readers, POLL_S)
                if not self._readers:
                    self._thread = threading.Thread()
                    return

    def wait(self, version: int, timeout_s: float) -> int:
        """Wait until the body is newer than `version`, and return its version."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != version, timeout_s)
            return self.version


def _words(error: Exception) -> str:
    """Return an error in words; of an unexpected one, also its class."""
    return str(error) if isinstance(error, ClusterError | OSError) else f"{type(error).__name__}: {error}"


class LiveJob:
    """Polls one job, over all its attempts, for the list and for the job's own page."""

    def __init__(self, job_id: str, store: JobStore) -> None:
        self._job_id = job_id
        self._store = store
        self._lock = threading.Lock()
        self._polled_at = 0.0
        self._monitor: job_monitor.JobMonitor | None = None  # reads the logs, once a page shows the job
        record = store.load(job_id)
        #: The status from the last poll.
        self.status = JobStatus(
            record, record.outcome or "starting", job_state.start(record.plan, record.created_at)
        )
        #: The view from the last poll that was answered; None before.
        self.view: JobView | None = None
        self._past: list[page.Ranks] = []

    @property
    def is_due(self) -> bool:
        """Whether it is time to poll it. An ended job is not polled: its machines may be off."""
        has_ended = self.record.outcome and self.status.state == self.record.outcome
        return not has_ended and time.time() - self._polled_at >= POLL_S / 2

    @property
    def has_page(self) -> bool:
        """Whether its own page has been shown, for which its logs are read."""
        return self._monitor is not None

    @property
    def record(self) -> JobRecord:
        """The job's record, as it was read last."""
        return self.status.record

    def reload(self) -> JobRecord:
        """Read its record again."""
        self.status = self.status._replace(record=self._store.load(self._job_id))
        return self.record

    def poll(self) -> None:
        """Poll for the page of the job, unless another page has just done so. It shows the metrics of all epochs,
        which only the logs have.
        """
        with self._lock:
            if not self.is_due and (self._monitor or (self.record.outcome and not self.view)):
                return
            self.reload()
            if self._monitor is None:
                self._monitor = job_monitor.JobMonitor(self._job_id, self._store)
            monitor = self._monitor
            try:
                monitor.step()
                status = job_status.observed(monitor.record, self._store, monitor.state, monitor.view)
            except ClusterError as error:
                status = job_status.unreachable(self.record, self._store, error, self.view)
            self._take(status)

    def take(self, status: JobStatus) -> None:
        """Take the result of a poll of many jobs."""
        with self._lock:
            self._take(status)

    def _take(self, status: JobStatus) -> None:
        now = time.time()
        self.status = status
        if status.state != job_status.UNREACHABLE or self.view is None:
            self.view = status.view
        if now - self._polled_at > _PAUSE_S:
            self._past = []
        self._polled_at = now
        ranks = {row.rank: row for node in self.view.nodes for row in node.ranks}
        if len(ranks) <= page.MOST_RANKS and ranks not in self._past[-1:]:
            self._past = [*self._past, ranks][-_SAMPLES:]

    @property
    def ended_at(self) -> float:
        """The job's end, or now."""
        return self.record.ended_at or time.time()

    def body(self) -> Markup:
        """Poll, and return the content of the job's page."""
        self.poll()
        shown = page.Shown(self.status.state, self.status.words(time.time()), self.status.problem)
        return page.sections(self.record, shown, self.view, self.ended_at, is_live=True, past=self._past)

    def row(self) -> page.JobRow:
        """Return the job's row in the list, as of the last poll."""
        record = self.record
        plan = self.record.plan
        return page.JobRow(
            Markup('<a href="jobs/{}/">{}</a>').format(plan.job_id, plan.job_id),
            self.status.state,
            self.status.words(time.time()),
            seconds(max(0.0, self.ended_at - record.launched_at)),
            str(self.status.nodes),
            str(plan.attempt),
            plan.backend,
            self.status.problem or record.detail,
        )


def poll_list(shown: Sequence[LiveJob], store: JobStore) -> None:
    """Poll the jobs that are due, with as few commands as possible. One job hides no other."""
    due = []
    for job in shown:
        if job.is_due and job.has_page:
            try:
                job.poll()
            except Exception as error:
                job.take(job_status.unreachable(job.record, store, error, job.view))
        elif job.is_due:
            with contextlib.suppress(ClusterError):  # its record was removed a moment ago
                job.reload()
            due.append(job)
    for job, status in zip(due, job_monitor.poll_all([job.record for job in due], store), strict=True):
        job.take(status)


def log_lines(job: LiveJob, live: LivePage, node: str, query: str) -> Iterator[list[str]]:
    """Yield the lines of a node's log that have `query`, over all attempts: the last ones, then new ones.

    An empty list means that nothing is new.
    """
    wanted = query.casefold()
    attempt = 1
    offset = 0
    rest = b""
    refused: set[Path] = set()
    lines: deque[str] = deque(maxlen=_LOG_LINES)
    version = -1
    is_first = True
    with live:
        while True:
            run_dir = Path(job.record.plan.run_dir)
            newest = job.record.plan.attempt
            while attempt <= newest:
                path = run_dir / f"attempt-{attempt}" / f"{node}.log"
                if offset == 0 and not wanted and newest > 1 and path.exists():
                    lines.append(f"--- attempt {attempt} ---")
                try:
                    offset, rest = _read(run_dir, path, offset, rest, wanted, lines)
                except OSError as error:
                    if error.errno in inside.REFUSED and path not in refused:
                        refused.add(path)
                        lines.append(f"{path.name} is not read: it {error.strerror}")
                if attempt == newest:
                    break
                attempt = attempt + 1
                offset = 0
                rest = b""
            if lines or is_first:
                is_first = False
                yield list(lines)
                lines.clear()
            version = live.wait(version, POLL_S)
            yield []


def _read(
    run_dir: Path, path: Path, offset: int, rest: bytes, wanted: str, lines: deque[str]
) -> tuple[int, bytes]:
    """Append the lines of a log after `offset` that have `wanted`. Return the new offset and the incomplete line.

    Raises OSError if the log does not exist yet, or leads out of the run directory.
    """
    with inside.open_file(run_dir, path) as file:
        file.seek(offset)
        while chunk := file.read(1 << 20):
            offset += len(chunk)
            *complete, rest = (rest + chunk).split(b"\n")
            for line in complete:
                text = line.decode(errors="replace").rstrip("\r")
                if "::cluster {" not in text and (not wanted or wanted in text.casefold()):
                    lines.append(text)
    return offset, rest
