"""HTTP server of the job pages. It is read-only, and polls a job only while a page shows it.

A page is HTML from `cluster.supervisor.page` and a small script. The script replaces the page's content by what
server-sent events bring. `Markup` escapes all text of jobs, and the content security policy allows no other script.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePath
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from markupsafe import Markup

from cluster.errors import ClusterError, UsageError
from cluster.spec.model import JobRecord
from cluster.store import JobStore
from cluster.supervisor import page
from cluster.transport import inside
from cluster.web.live import POLL_S, LiveJob, LivePage, log_lines, poll_list

#: A comment in each stream at this interval finds the connections that a browser has closed.
_KEEP_ALIVE_S = 10.0
#: The host names with which a browser on this machine reaches a server that listens on localhost only.
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_TYPES = {".png": "image/png", ".jpg": "image/jpeg", **dict.fromkeys((".log", ".csv", ".yaml"), "text/plain")}

_LIVE = Markup("""
const live = document.getElementById("live"), link = document.getElementById("link")
const source = new EventSource(live.dataset.events)
source.onopen = () => link.textContent = ""
source.onerror = () => link.textContent = "no connection to clusterctl serve; trying again"
const opened = new Map()  // whether the user has opened or closed a <details>
let last = []
source.onmessage = event => {
  const page = document.createElement("template")
  page.innerHTML = JSON.parse(event.data)
  for (const each of live.querySelectorAll("details")) opened.set(each.id, each.open)
  for (const each of page.content.querySelectorAll("details")) each.open = opened.get(each.id) ?? each.open
  const sections = [...page.content.children], texts = sections.map(each => each.outerHTML)
  const focus = document.activeElement?.getAttribute("href")
  while (live.children.length > sections.length) live.lastElementChild.remove()
  sections.forEach((section, index) => {
    if (!live.children[index]) live.append(section)
    else if (texts[index] !== last[index]) update(live.children[index], section)
  })
  last = texts
  if (focus && document.activeElement?.getAttribute("href") !== focus)  // rows have moved
    live.querySelector(`[href="${CSS.escape(focus)}"]`)?.focus()
}
// Changes only what differs: elements keep the focus, their scroll position and selected text.
function update(old, wanted) {
  if (old.nodeName !== wanted.nodeName) return old.replaceWith(wanted)
  if (old.nodeType === Node.TEXT_NODE && old.data !== wanted.data) old.data = wanted.data
  for (const each of wanted.attributes ?? [])
    if (old.getAttribute(each.name) !== each.value) old.setAttribute(each.name, each.value)
  for (const name of old.getAttributeNames?.() ?? []) if (!wanted.hasAttribute(name)) old.removeAttribute(name)
  const children = [...wanted.childNodes]
  while (old.childNodes.length > children.length) old.lastChild.remove()
  children.forEach((each, index) => old.childNodes[index] ? update(old.childNodes[index], each) : old.append(each))
}
""")

_LOG = Markup("""
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
""")


class Server(ThreadingHTTPServer):
    """The server. Each browser must open a URL with `?token=TOKEN` once: all users of this machine reach localhost."""

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], store: JobStore, token: str, *, has_metrics: bool = False
    ) -> None:
        self.store = store
        self.token = token
        self.has_metrics = has_metrics
        #: The value of the cookie. A browser also sends it to servers of other users on other ports of this machine.
        self.session = secrets.token_urlsafe(24)
        self.is_local = address[0] in LOOPBACK
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._jobs: dict[str, LiveJob] = {}
        self._pages: dict[str, LivePage] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def job(self, job_id: str) -> LiveJob:
        """Return the poller of a job. Raise UsageError if there is none."""
        with self._lock:
            if job_id not in self._jobs:
                self._jobs[job_id] = LiveJob(job_id, self.store)
            return self._jobs[job_id]

    def jobs(self) -> list[LiveJob]:
        """Return the pollers of all jobs, newest first."""
        names = [record.plan.job_id for record in reversed(list(self.store))]
        with self._lock:  # forget those whose records were removed
            self._jobs = {name: job for name, job in self._jobs.items() if name in names}
            self._pages = {name: live for name, live in self._pages.items() if not name or name in names}
        return [self.job(name) for name in names]

    def page(self, job_id: str = "") -> LivePage:
        """Return the page of a job, or of the list of jobs."""
        poll = self.job(job_id).body if job_id else self._list
        with self._lock:
            return self._pages.setdefault(job_id, LivePage(poll))

    def _list(self) -> Markup:
        jobs = self.jobs()
        damaged = self.store.unreadable()
        if not jobs and not damaged:
            return Markup(
                "<section><h1>Jobs</h1><p>no jobs yet: <code>clusterctl launch --nodes 2 --gpus 2</code></p></section>"
            )
        poll_list(jobs, self.store)
        rows = sorted((job.row() for job in jobs), key=lambda row: not row.runs)
        rows += [
            page.JobRow(unreadable.job_id, "unreadable", "unreadable", cause=unreadable.error.message)
            for unreadable in damaged
        ]
        return Markup("<section><h1>Jobs</h1>{}</section>").format(page.job_list(rows))


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "clusterctl"
    sys_version = ""
    timeout = 30.0

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
            host = urlsplit("//" + self.headers.get("Host", ""))
            name = host.hostname
            port = host.port
        except ValueError:  # brackets without an address, or no port
            self._refuse(HTTPStatus.BAD_REQUEST, "the request's address or its Host header is malformed")
            return
        try:
            if self._is_allowed(url, name, f"clusterctl-{port or 80}"):
                self._route(unquote(url.path), parse_qs(url.query))
        except UsageError:
            self._refuse(HTTPStatus.NOT_FOUND, "no such job")
        except ClusterError as error:  # a record that cannot be read
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, error.message)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            pass

    def _is_allowed(self, url: SplitResult, host: str | None, cookie: str) -> bool:
        """Answer requests from other sites and without the token, and return whether the request is allowed.

        `host` is the name by which the browser reaches the server, and `cookie` the cookie's name. All ports of a host
        share their cookies, so the port that the browser sees is in the name.
        """
        # DNS rebinding: another site's name for this address.
        if self.server.is_local and host not in LOOPBACK:
            self._refuse(HTTPStatus.FORBIDDEN, "open this page as http://localhost")
            return False
        given = parse_qs(url.query).get("token", [""])[0]
        if _is_equal(given, self.server.token):
            self.send_response(HTTPStatus.SEE_OTHER)
            self.send_header("Location", f"/{url.path.lstrip('/')}")  # two slashes would name another host
            self.send_header(
                "Set-Cookie", f"{cookie}={self.server.session}; HttpOnly; SameSite=Strict; Path=/"
            )
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            return False
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if _is_equal(bearer, self.server.token) or _is_equal(self._cookie(cookie), self.server.session):
            return True
        self._refuse(HTTPStatus.FORBIDDEN, "open the URL with the token that clusterctl serve has printed")
        return False

    def _cookie(self, name: str) -> str:
        """Return the value of a cookie of the request, or ""."""
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(name)
        except CookieError:
            return ""
        return cookie.value if cookie else ""

    def _route(self, path: str, query: dict[str, list[str]]) -> None:
        if path == "/":
            self._live_page("Jobs", self.server.page(), Markup(""))
        elif path == "/events":
            self._stream(_bodies(self.server.page()))
        elif path == "/metrics" and self.server.has_metrics:
            from cluster.web import metrics

            damaged = [unreadable.job_id for unreadable in self.server.store.unreadable()]
            polled = self.server.jobs()
            poll_list(polled, self.server.store)
            text = metrics.render(polled, damaged)
            self._head("text/plain; version=0.0.4; charset=utf-8", "default-src 'none'", len(text))
            self.wfile.write(text)
        elif not (match := re.fullmatch(r"/jobs/([^/]+)/(.*)", path)):
            self._refuse(HTTPStatus.NOT_FOUND, "no such page")
        else:
            job_id, rest = match.groups()
            record = self.server.job(job_id).record
            log = re.fullmatch(r"logs/([^/]+?)(/events)?", rest)
            if rest == "":
                nav = Markup('<nav><a href="../../">all jobs</a></nav>')
                self._live_page(job_id, self.server.page(job_id), nav)
            elif rest == "events":
                self._stream(_bodies(self.server.page(job_id)))
            elif log and log[1] in {node.name for node in record.plan.nodes}:
                if log[2]:
                    words = query.get("q", [""])[0]
                    self._stream(log_lines(self.server.job(job_id), self.server.page(job_id), log[1], words))
                else:
                    self._log_page(job_id, log[1])
            else:
                self._file(record, rest)

    def _live_page(self, title: str, live: LivePage, nav: Markup) -> None:
        with live:
            live.wait(0, 5.0)
            body = live.body or Markup("<section>waiting for the nodes to answer</section>")
        main = Markup('{}<p id="link" role="status"></p><main id="live" data-events="events">{}</main>')
        self._page(title, main.format(nav, body), _LIVE)

    def _log_page(self, job_id: str, node: str) -> None:
        body = Markup(
            '<nav><a href="../">{}</a></nav><h1>{}</h1><p><input id="search" type="search" '
            'placeholder="search" aria-label="lines with this text" autofocus></p>'
            '<p><label><input id="follow" type="checkbox" checked> scroll to new lines</label></p>'
            '<p id="link" role="status"></p><pre id="log" tabindex="0" data-events="{}/events"></pre>'
        )
        self._page(f"{job_id}: {node}", body.format(job_id, node, node), _LOG)

    def _page(self, title: str, body: Markup, script: Markup) -> None:
        nonce = secrets.token_urlsafe(16)
        head = Markup('<link rel="icon" href="data:,"><style nonce="{}">{}</style>').format(nonce, page.STYLE)
        body += Markup('\n<script nonce="{}">{}</script>').format(nonce, script)
        text = page.document(title, head, body).encode("utf-8", "replace")
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self._head("text/html; charset=utf-8", policy, len(text))
        self.wfile.write(text)

    def _file(self, record: JobRecord, name: str) -> None:
        """Send a file of the run directory."""
        try:
            opened = inside.open_file(record.plan.run_dir, name.lstrip("/"))
        except (OSError, ValueError):  # ValueError: a name with a zero byte
            self._refuse(HTTPStatus.NOT_FOUND, "no such file")
            return
        kind = _TYPES.get(PurePath(name).suffix, "application/octet-stream")
        with opened as file:
            size = os.fstat(file.fileno()).st_size
            self._head(
                f"{kind}; charset=utf-8" if kind == "text/plain" else kind,
                "default-src 'none'; sandbox",
                size,
            )
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


def _is_equal(given: str, wanted: str) -> bool:
    """Compare in a time that does not depend on where the texts differ."""
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())


def _bodies(live: LivePage) -> Iterator[str]:
    """Yield each new body of a page, and "" at least once per poll."""
    version = 0
    with live:
        while True:
            newer = live.wait(version, POLL_S)
            yield live.body if newer != version else ""
            version = newer
