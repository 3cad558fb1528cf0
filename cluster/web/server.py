"""HTTP server of the job pages. It is read-only, and polls a job only while a page shows it.

A page is HTML from `cluster.supervisor.page` and a small script. The script replaces the page's content by what
server-sent events bring. All text of jobs is escaped, and the content security policy allows no other script.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from html import escape
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from cluster.errors import ClusterError
from cluster.spec.model import JobRecord
from cluster.store import JobStore
from cluster.supervisor import jobs, page
from cluster.supervisor.job_state import JobView
from cluster.supervisor.report import seconds

_POLL_S = 1.0
#: A comment in each stream at this interval finds the connections that a browser has closed.
_KEEP_ALIVE_S = 10.0
#: Lines of a log, or of a search in it, that the page shows at first.
_LOG_LINES = 2000
_COOKIE = "clusterctl"
#: The host names with which a browser on this machine reaches a server that listens on localhost only.
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_TYPES = {".png": "image/png", ".jpg": "image/jpeg", **dict.fromkeys((".log", ".csv", ".yaml"), "text/plain")}

_LIVE = """
const live = document.getElementById("live"), link = document.getElementById("link")
const source = new EventSource(live.dataset.events)
source.onopen = () => link.textContent = ""
source.onerror = () => link.textContent = "no connection to clusterctl serve; trying again"
const opened = new Map()  // whether the user has opened or closed a <details>
let last = []
source.onmessage = event => {
  const page = document.createElement("template")
  page.innerHTML = JSON.parse(event.data)
  const focus = document.activeElement?.getAttribute("href")
  const sections = [...page.content.children], texts = sections.map(each => each.outerHTML)
  while (live.children.length > sections.length) live.lastElementChild.remove()
  sections.forEach((section, index) => {
    const old = live.children[index]
    if (!old) live.append(section)
    else if (texts[index] !== last[index]) {
      for (const each of old.querySelectorAll("details")) opened.set(each.id, each.open)
      for (const each of section.querySelectorAll("details")) each.open = opened.get(each.id) ?? each.open
      old.replaceWith(section)
    }
  })
  last = texts
  if (focus && document.activeElement === document.body) live.querySelector(`[href="${CSS.escape(focus)}"]`)?.focus()
}
"""

_LOG = """
const log = document.getElementById("log"), link = document.getElementById("link")
const search = document.getElementById("search"), follow = document.getElementById("follow")
let source, timer
function connect() {
  source?.close()
  log.textContent = ""
  source = new EventSource(log.dataset.events + "?q=" + encodeURIComponent(search.value))
  source.onopen = () => { log.textContent = link.textContent = "" }
  source.onerror = () => link.textContent = "no connection to clusterctl serve; trying again"
  source.onmessage = event => {
    log.append(JSON.parse(event.data).join("\\n") + "\\n")
    while (log.childNodes.length > 500) log.firstChild.remove()
    if (follow.checked) log.scrollTop = log.scrollHeight
  }
}
search.oninput = () => { clearTimeout(timer); timer = setTimeout(connect, 300) }
connect()
"""


class Watch:
    """Polls in a thread while someone reads: `with watch:`, then `wait`."""

    def __init__(self, poll: Callable[[], str]) -> None:
        self._poll = poll
        self._changed = threading.Condition()
        self._readers, self._thread = 0, threading.Thread()
        self.version, self.body = 0, ""

    def __enter__(self) -> Watch:
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
            except (ClusterError, OSError) as error:
                body = f'<section class="failed">{escape(str(error))}</section>'
            with self._changed:
                if body != self.body or not self.version:
                    self.body, self.version = body, self.version + 1
                    self._changed.notify_all()
                self._changed.wait_for(lambda: not self._readers, _POLL_S)
                if not self._readers:
                    self._thread = threading.Thread()
                    return

    def wait(self, version: int, timeout_s: float) -> int:
        """Wait until the body is newer than `version`, and return its version."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != version, timeout_s)
            return self.version


class PolledJob:
    """Polls one job, over all its attempts, for the list and for the job's own page."""

    def __init__(self, job_id: str, store: JobStore) -> None:
        self._job_id, self._store = job_id, store
        self._lock, self._polled_at = threading.Lock(), 0.0
        self.record = store.load(job_id)
        self._follower = jobs.Follower(self.record)
        self.state: str = self.record.outcome or "joining"
        self.view: JobView | None = None

    def poll(self) -> None:
        """Poll, unless another page has just done so. An ended job is not polled: its machines may be off."""
        with self._lock:
            if (
                self.record.outcome and self.state == self.record.outcome
            ) or time.time() - self._polled_at < _POLL_S / 2:
                return
            self.record = record = self._store.load(self._job_id)
            if record.plan.attempt != self._follower.plan.attempt:
                metrics = self._follower.view.metrics
                self._follower = jobs.Follower(record)
                self._follower.view.metrics = metrics
            try:
                self.state, self.view = jobs.state(record, self._follower)
            except ClusterError:
                self.state = record.outcome or "unreachable"
            self._polled_at = time.time()

    @property
    def ended_at(self) -> float:
        """The job's end, or now."""
        return self.record.ended_at or time.time()

    def body(self) -> str:
        """Poll, and return the content of the job's page."""
        self.poll()
        return page.sections(self.record, self.state, self.view, self.ended_at, is_live=True)

    def row(self) -> str:
        """Poll, and return the job's row of the list."""
        self.poll()
        record, plan, count = self.record, self.record.plan, len(self.record.plan.nodes)
        begin = record.history[0].started_at if record.history else record.created_at
        ready = f"{self.view.ready_count}/" if self.view and not record.outcome else ""
        cells = (
            f'<a href="jobs/{escape(plan.job_id)}/">{escape(plan.job_id)}</a>',
            f'<span class="{self.state}">{self.state}</span>',
            escape(plan.backend),
            f"{ready}{count}",
            str(plan.attempt),
            seconds(max(0.0, self.ended_at - begin)),
            escape(record.detail),
        )
        return "<tr>" + "".join(f"<td>{cell}" for cell in cells)


class Server(ThreadingHTTPServer):
    """The server. With a `token`, each browser must open a URL with `?token=TOKEN` once."""

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], store: JobStore, token: str = "", *, has_metrics: bool = False
    ) -> None:
        self.store, self.token, self.has_metrics = store, token, has_metrics
        self.is_local = address[0] in LOOPBACK
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._jobs: dict[str, PolledJob] = {}
        self._watches: dict[str, Watch] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def job(self, job_id: str) -> PolledJob:
        """Return the poller of a job. Raise UsageError if there is none."""
        with self._lock:
            if job_id not in self._jobs:
                self._jobs[job_id] = PolledJob(job_id, self.store)
            return self._jobs[job_id]

    def jobs(self) -> list[PolledJob]:
        """Return the pollers of all jobs, newest first."""
        return [self.job(record.plan.job_id) for record in reversed(list(self.store))]

    def watch(self, job_id: str = "") -> Watch:
        """Return the watch of a job, or of the list of jobs."""
        poll = self.job(job_id).body if job_id else self._list
        with self._lock:
            return self._watches.setdefault(job_id, Watch(poll))

    def _list(self) -> str:
        found = self.jobs()
        if not found:
            return (
                "<section><h1>Jobs</h1><p>no jobs yet: <code>clusterctl launch --nodes 2 --gpus 2</code></p></section>"
            )
        rows = "".join(job.row() for job in found)
        titles = "".join(
            f"<th>{title}" for title in ("job", "state", "backend", "nodes", "attempt", "duration", "cause")
        )
        return f'<section><h1>Jobs</h1><div class="wide" tabindex="0"><table><tr>{titles}{rows}</table></div></section>'

    def log_lines(self, job_id: str, node: str, query: str) -> Iterator[list[str]]:
        """Yield the lines of a node's log that have `query`, over all attempts: the last ones, then new ones.

        An empty list means that nothing is new.
        """
        job, wanted, attempt, offset, rest = self.job(job_id), query.casefold(), 1, 0, b""
        lines: deque[str] = deque(maxlen=_LOG_LINES)
        version, is_first = -1, True
        with self.watch(job_id) as watch:
            while True:
                run_dir, newest = Path(job.record.plan.run_dir), job.record.plan.attempt
                while attempt <= newest:
                    path = run_dir / f"attempt-{attempt}" / f"{node}.log"
                    if offset == 0 and not wanted and newest > 1 and path.exists():
                        lines.append(f"--- attempt {attempt} ---")
                    offset, rest = _read(path, offset, rest, wanted, lines)
                    if attempt == newest:
                        break
                    attempt, offset, rest = attempt + 1, 0, b""
                if lines or is_first:
                    is_first = False
                    yield list(lines)
                    lines.clear()
                version = watch.wait(version, _POLL_S)
                yield []


def _read(path: Path, offset: int, rest: bytes, wanted: str, lines: deque[str]) -> tuple[int, bytes]:
    """Append the lines of a log after `offset` that have `wanted`. Return the new offset and the incomplete line."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while chunk := file.read(1 << 20):
                offset += len(chunk)
                *complete, rest = (rest + chunk).split(b"\n")
                for line in complete:
                    text = line.decode(errors="replace").rstrip("\r")
                    if "::cluster {" not in text and (not wanted or wanted in text.casefold()):
                        lines.append(text)
    except OSError:
        pass
    return offset, rest


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "clusterctl", ""
    timeout = 30.0

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        try:
            if self._is_allowed(url.query, url.path):
                self._route(unquote(url.path), parse_qs(url.query))
        except ClusterError:
            self._refuse(HTTPStatus.NOT_FOUND, "no such job")
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            pass

    def _is_allowed(self, query: str, path: str) -> bool:
        """Answer requests from other sites and without the token, and return whether to go on."""
        host = urlsplit("//" + self.headers.get("Host", "")).hostname
        if self.server.is_local and host not in LOOPBACK:  # DNS rebinding: another site's name for this address
            self._refuse(HTTPStatus.FORBIDDEN, "open this page as http://localhost")
            return False
        if not self.server.token:
            return True
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(bearer.encode(), self.server.token.encode()):
            return True
        given = parse_qs(query).get("token", [""])[0]
        if hmac.compare_digest(given.encode(), self.server.token.encode()):
            self.send_response(HTTPStatus.SEE_OTHER)
            self.send_header("Location", path)
            self.send_header("Set-Cookie", f"{_COOKIE}={given}; HttpOnly; SameSite=Strict; Path=/")
            self.end_headers()
            return False
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            cookie = None
        if cookie and hmac.compare_digest(cookie.value.encode(), self.server.token.encode()):
            return True
        self._refuse(HTTPStatus.UNAUTHORIZED, "open the URL with the token that clusterctl serve has printed")
        return False

    def _route(self, path: str, query: dict[str, list[str]]) -> None:
        if path == "/":
            self._live_page("Jobs", self.server.watch(), "")
        elif path == "/events":
            self._stream(_bodies(self.server.watch()))
        elif path == "/metrics" and self.server.has_metrics:
            from cluster.web import metrics

            text = metrics.render(self.server.jobs())
            self._head("text/plain; version=0.0.4; charset=utf-8", "default-src 'none'", len(text))
            self.wfile.write(text)
        elif not (found := re.fullmatch(r"/jobs/([^/]+)/(.*)", path)):
            self._refuse(HTTPStatus.NOT_FOUND, "no such page")
        else:
            job_id, rest = found.groups()
            record = self.server.job(job_id).record
            log = re.fullmatch(r"logs/([^/]+?)(/events)?", rest)
            if rest == "":
                self._live_page(job_id, self.server.watch(job_id), '<nav><a href="../../">all jobs</a></nav>')
            elif rest == "events":
                self._stream(_bodies(self.server.watch(job_id)))
            elif log and log[1] in {node.name for node in record.plan.nodes}:
                if log[2]:
                    self._stream(self.server.log_lines(job_id, log[1], query.get("q", [""])[0]))
                else:
                    self._log_page(job_id, log[1])
            else:
                self._file(record, rest)

    def _live_page(self, title: str, watch: Watch, nav: str) -> None:
        with watch:
            watch.wait(0, 5.0)
            body = watch.body or "<section>waiting for the nodes to answer</section>"
        self._page(
            title, f'{nav}<p id="link" role="status"></p><main id="live" data-events="events">{body}</main>', _LIVE
        )

    def _log_page(self, job_id: str, node: str) -> None:
        body = (
            f'<nav><a href="../">{escape(job_id)}</a></nav><h1>{escape(node)}</h1><p><input id="search" type="search" '
            'placeholder="search" aria-label="lines with this text" autofocus></p>'
            '<p><label><input id="follow" type="checkbox" checked> scroll to new lines</label></p>'
            f'<p id="link" role="status"></p><pre id="log" tabindex="0" data-events="{escape(node)}/events"></pre>'
        )
        self._page(f"{job_id}: {node}", body, _LOG)

    def _page(self, title: str, body: str, script: str) -> None:
        nonce = secrets.token_urlsafe(16)
        head = f'<link rel="icon" href="data:,"><style nonce="{nonce}">{page.STYLE}</style>'
        text = page.document(title, head, f'{body}\n<script nonce="{nonce}">{script}</script>').encode()
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self._head("text/html; charset=utf-8", policy, len(text))
        self.wfile.write(text)

    def _file(self, record: JobRecord, name: str) -> None:
        """Send a file of the run directory."""
        folder = Path(record.plan.run_dir).resolve()
        path = (folder / name.lstrip("/")).resolve() if "\0" not in name else folder
        if not path.is_relative_to(folder) or not path.is_file():
            self._refuse(HTTPStatus.NOT_FOUND, "no such file")
            return
        kind = _TYPES.get(path.suffix, "application/octet-stream")
        with path.open("rb") as file:
            size = path.stat().st_size
            self._head(f"{kind}; charset=utf-8" if kind == "text/plain" else kind, "default-src 'none'; sandbox", size)
            while data := file.read(min(size, 1 << 20)):  # not more than announced, of a file that grows
                self.wfile.write(data)
                size -= len(data)

    def _stream(self, messages: Iterator[Any]) -> None:
        """Send server-sent events until the browser closes the connection. An empty message only keeps it alive."""
        self._head("text/event-stream", "default-src 'none'")
        sent = time.monotonic()
        for message in messages:
            if message:
                self.wfile.write(f"data: {json.dumps(message)}\n\n".encode())
            elif time.monotonic() - sent > _KEEP_ALIVE_S:
                self.wfile.write(b": \n\n")
            else:
                continue
            sent = time.monotonic()
            self.wfile.flush()

    def _head(self, kind: str, policy: str, size: int | None = None) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        if size is not None:
            self.send_header("Content-Length", str(size))
        self.end_headers()

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        data = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print no line per request."""


def _bodies(watch: Watch) -> Iterator[str]:
    """Yield each new body of a watch, and "" at least once per poll."""
    version = 0
    with watch:
        while True:
            newer = watch.wait(version, _POLL_S)
            yield watch.body if newer != version else ""
            version = newer
