"""Runs rsync between this machine and a node: its changes, its progress, its errors in the system's words.

The `ssh` program that rsync starts never asks, and trusts only known host keys.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from subprocess import PIPE
from typing import Any, TypeVar

from cluster.errors import ClusterError, LaunchError, UnreachableError
from cluster.model import Node
from cluster.shells import close_all
from cluster.shells.openssh import destination, remote_shell
from cluster.shells.result import BEGIN

T = TypeVar("T")

#: Marker files and incomplete transfers have names that begin with this.
OURS = ".clusterctl-"
#: A folder with this file holds the results of jobs. The file's text is an rsync rule that leaves its folder out.
RUNS_MARK, RUNS_RULE = f"{OURS}runs", "- *\n"
#: Caches that programs write into data and code belong to one machine.
LEFT_OUT = (".trainer-cache", "__pycache__", f"{OURS}*")

_OPTIONS = (
    *("--recursive", "--links", "--times", "--omit-dir-times", "--omit-link-times", "--modify-window=-1"),
    *("--protect-args", "--timeout=120", f"--partial-dir={OURS}partial"),
    *("--out-format=%i %l %n", "--info=progress2", "--stats", "--no-human-readable", "--outbuf=L"),
    *(f"--exclude={name}" for name in LEFT_OUT),
    f"--filter=: {RUNS_MARK}",
)
#: rsync's codes: files vanished during the transfer; the connection failed.
VANISHED, _DISCONNECTED = 24, (10, 12, 30, 35, 255)
#: How many connections rsync has at once, and how long it tries to log in: sshd refuses those above its MaxStartups.
_AT_ONCE, _BUSY_S = threading.BoundedSemaphore(8), 20.0
#: A line of `--out-format`: rsync's eleven letters of a change, the size, the name.
_CHANGE = re.compile(r"(\*deleting  |[<>ch.][fdLDS]\S{9}) (\d+) (.*)")

_HINTS = {
    "No space left on device": "free disk space there, or (clusterctl sync) choose another data_dir in the inventory",
    "Permission denied": "choose a data_dir in the inventory that the login can write to",
}


def require_rsync() -> None:
    """Raise ClusterError if this machine has no rsync."""
    if not shutil.which("rsync"):
        raise ClusterError("this machine: rsync is not installed", "sudo apt-get install rsync")


def at(node: Node) -> str:
    """`user@host:` before a path of the node, "" if the node is this machine."""
    return f"{destination(node)}:" if node.login else ""


class Rsync:
    """One run of rsync: its exit code, errors and changes, and the bytes over the network."""

    def __init__(
        self, node: Node, words: Sequence[str], stdin: str = "", sent: Callable[[int], None] = lambda _: None
    ) -> None:
        self._node, self._stdin, self._sent = node, stdin, sent
        # Without --blocking-io the filter of the remote shell would fail to write as soon as rsync reads too slowly.
        remote = ["--blocking-io", "-e", remote_shell(node), f"--rsync-path=echo {BEGIN}; exec rsync"]
        self._argv = ["rsync", *_OPTIONS, *(remote if node.login else []), *words]
        self.code, self.errors, self.moved = 0, "", 0
        self.changes: list[tuple[str, int, str]] = []

    def __call__(self) -> None:
        """Run it, again where an sshd refuses the connection because of many others.

        Raises LaunchError when it was interrupted, ClusterError when there is no rsync here.
        """
        require_rsync()
        until = time.monotonic() + _BUSY_S
        with _AT_ONCE:
            self._run()
            while (
                self.code in _DISCONNECTED
                and re.search("kex_exchange|banner exchange", self.errors)
                and time.monotonic() < until
            ):
                time.sleep(random.uniform(0.5, 1.5))
                self._run()

    def _run(self) -> None:
        # In the C locale rsync prints every byte that is not printable ASCII as \#ooo.
        environment = {**os.environ, "LC_ALL": "C"}
        text = {"encoding": "ascii", "errors": "surrogateescape"}
        with (
            tempfile.TemporaryFile() as errors,
            started(self._argv, stdin=PIPE, stdout=PIPE, stderr=errors, env=environment, **text) as process,
        ):
            assert process.stdin
            assert process.stdout
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(self._stdin)
            for line in process.stdout:
                self._read(line.rstrip("\n"))
            self.code = process.wait()
            errors.seek(0)
            self.errors = errors.read().decode(errors="replace")

    def refuse_failure(self, receiver: str, sender: str) -> None:
        """Raise ClusterError with the reason why rsync failed, at the `receiver` or at the `sender`.

        Both are what happened, with the machine: `gpu-a: /data cannot be written`.
        """
        if not self.code:
            return
        name = self._node.name
        if self.code in _DISCONNECTED and "failed" not in self.errors:
            raise UnreachableError(
                f"{name}: the connection broke: {reason(self.errors)}", "the same command continues from there"
            )
        if re.search(r"rsync.*not found", self.errors):
            raise ClusterError(f"{name}: rsync is not installed", f"on {name}: sudo apt-get install rsync")
        # The sender cannot write any more when the receiver has ended.
        errors = re.sub(r"(?m)^rsync: \[sender\] write error.*", "", self.errors)
        is_sender = self.code == VANISHED or re.search(r"(?m)^rsync: \[sender\]", errors)
        raise error_of(sender if is_sender else receiver, errors)

    def _read(self, line: str) -> None:
        if found := _CHANGE.fullmatch(line):
            name = re.sub(rb"\\#(\d{3})", lambda octal: bytes([int(octal[1], 8)]), os.fsencode(found[3]))
            self.changes.append((found[1], int(found[2]), os.fsdecode(name)))
        elif found := re.match(r"\s*(\d+)\s+\d+%", line):
            self._sent(int(found[1]))
        elif found := re.match(r"Total bytes (?:sent|received): (\d+)", line):
            self.moved = max(self.moved, int(found[1]))


#: The processes that Ctrl-C ends, and whether it came.
_processes: set[subprocess.Popen[Any]] = set()
_interrupted = threading.Event()
_lock = threading.Lock()


@contextmanager
def started(argv: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process in a session of its own, which `interruptible` ends. Raises LaunchError when it was interrupted."""
    with _lock:
        _refuse_interrupted()
        process = subprocess.Popen(argv, start_new_session=True, **options)
        _processes.add(process)
    with process:
        try:
            yield process
        finally:
            process.terminate()
            with _lock:
                _processes.discard(process)
    _refuse_interrupted()


def _refuse_interrupted() -> None:
    if _interrupted.is_set():
        raise LaunchError("this machine: interrupted")


def interruptible(work: Callable[[], T]) -> T:
    """Return what `work` returns. Ctrl-C ends its transfers, waits for it, and raises KeyboardInterrupt."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work)
        try:
            return running.result()
        except KeyboardInterrupt:
            with _lock:
                _interrupted.set()
                for process in _processes:
                    process.terminate()
            close_all()  # a command that a thread waits for ends with its connection
            wait([running])
            _interrupted.clear()
            raise


def error_of(failed: str, errors: str) -> ClusterError:
    """The error `gpu-a: /data cannot be written: REASON`, from what failed and the program's stderr."""
    why = reason(errors)
    return ClusterError(f"{failed}: {why}", _HINTS.get(why, ""))


def reason(errors: str) -> str:
    """The reason in a program's stderr, in the system's words: `No space left on device` of rsync and mkdir alike."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # The lines of rsync first: ssh and the login shell may have written others.
    for line in sorted(lines, key=lambda line: not line.startswith("rsync: [")):
        found = re.search(r": ([A-Z][A-Za-z' -]+?)(?: \(\d+\))?$", line)
        if found and not found[1].startswith("Exiting"):
            return found[1]
    return lines[-1] if lines else "no reason was printed"
