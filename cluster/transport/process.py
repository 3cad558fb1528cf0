"""Processes that Ctrl-C ends: programs on this machine, and commands with large input or output on a node."""

import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from subprocess import PIPE
from typing import IO, Any, TypeVar

from cluster.errors import UnreachableError
from cluster.spec.model import Machine
from cluster.transport import close_all, ssh_to
from cluster.transport.interruption import interrupted, refuse_interrupted
from cluster.transport.local import Completed, environment
from cluster.transport.login import answers
from cluster.transport.openssh import MARK, Ssh, after_mark

T = TypeVar("T")

#: Concurrent logins of the program ssh: sshd refuses more than its MaxStartups.
CONNECTIONS = threading.BoundedSemaphore(8)
#: Limit of a login with the start of its shell.
_LOGIN_S = 30.0
#: The exit code of ssh, and also of commands; and what ssh prints if its connection breaks. Over a master connection it
#: prints nothing.
_SSH_FAILED = 255
_BROKE = re.compile(r"client_loop: |Connection to \S+ (closed by|timed out)|Timeout, server ")
#: The running processes, which Ctrl-C terminates.
_processes: set[subprocess.Popen[Any]] = set()
_lock = threading.Lock()


@contextmanager
def started(argv: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a process in its own session, which `interruptible` can terminate. Raise LaunchError if it did."""
    with _lock:
        refuse_interrupted()
        try:
            process = subprocess.Popen(argv, start_new_session=True, **options)
        except FileNotFoundError as error:
            raise UnreachableError(f"this machine: program {argv[0]!r} not found") from error
        _processes.add(process)
    with process:
        try:
            yield process
        finally:
            _end(process)
            with _lock:
                _processes.discard(process)
    refuse_interrupted()


def end_all() -> None:
    """Terminate the processes of `started`, with what they have started."""
    for process in list(_processes):
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)


def interruptible(work: Callable[[], T]) -> T:
    """Run `work` and return its result. Ctrl-C ends its transfers, waits for it, and raises KeyboardInterrupt."""
    result: Future[T] = Future()
    is_cancelled = threading.Event()

    def run() -> None:
        if is_cancelled.is_set():
            return
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    # Not a ThreadPoolExecutor: Ctrl-C within its `submit` would leave the work running, and wait for its end.
    thread = threading.Thread(target=run)
    try:
        thread.start()
        return result.result()
    except KeyboardInterrupt:
        is_cancelled.set()
        with _lock:
            interrupted.set()
            end_all()
        close_all()  # ends remote commands that threads wait for
        with suppress(RuntimeError):  # not started yet: it will find that it is cancelled
            thread.join()
        interrupted.clear()
        raise


@dataclass(frozen=True)
class PipedProcess:
    """A running command: write and close `stdin`, read `stdout` to its end, then call `wait`."""

    name: str
    ssh: Ssh
    stdin: IO[bytes]
    stdout: IO[bytes]
    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def wait(self, timeout_s: float) -> Completed:
        """Return the exit code and stderr (`out` is empty).

        Raises UnreachableError if the command does not end in time, or if the connection has broken.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(f"{self.name}: a command did not end within {timeout_s:g} s") from error
        self.errors.seek(0)
        done = Completed(code, "", after_mark(self.errors.read())[1])
        if code == _SSH_FAILED and (
            _BROKE.match(done.last_line) or (self.ssh.socket and not answers(self.ssh))
        ):
            raise UnreachableError(f"{self.name}: the connection broke: {done.last_line}")
        return done


@contextmanager
def piped(node: Machine, argv: Sequence[str]) -> Iterator[PipedProcess]:
    """Start a command on a node with pipes; leaving the block ends it. Raise UnreachableError."""
    ssh = ssh_to(node)
    words = ssh.command(argv, marked=True)
    with (
        tempfile.TemporaryFile() as errors,
        started(words, stdin=PIPE, stdout=PIPE, stderr=errors, env=environment()) as process,
    ):
        assert process.stdin
        assert process.stdout
        running = PipedProcess(node.name, ssh, process.stdin, process.stdout, process, errors)
        if node.login:
            limit = threading.Timer(_LOGIN_S, process.terminate)
            with CONNECTIONS:
                limit.start()
                while (line := process.stdout.readline()) and not line.endswith(MARK):
                    pass
            limit.cancel()
            if not line:
                raise UnreachableError(f"{node.name}: the connection failed: {running.wait(10).last_line}")
        try:
            yield running
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
