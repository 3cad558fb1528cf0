"""Starts several ranks of one machine as processes of this interpreter, and ends them together."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from trainer import contract
from trainer.errors import TrainerError

LOST_GRACE_S = 10.0  # for ranks whose peer has failed: most notice, and say so themselves
STOP_GRACE_S = 60.0  # for ranks that were asked to stop: they may write a checkpoint first
OWN = "TRAINER_RANK_OF_PARENT"  # set for ranks started here: they end when their parent does, however it ends
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Line:
    """A line that a rank wrote, to stderr or else to stdout, without its newline."""

    rank: int
    stderr: bool
    text: str


def ranks_of(device: str, parallel: str) -> int:
    """The ranks of this machine for --device: one for each number, but with --parallel dp one for all of them."""
    return 1 if parallel == "dp" else device.count(",") + 1


def run_ranks(
    arguments: Sequence[str],
    count: int,
    environment: Mapping[str, str],
    tell: Callable[[Line], None],
    pass_on: Sequence[signal.Signals] = (),
) -> dict[int, int]:
    """Run `python -m trainer ARGUMENTS` as `count` ranks, handing every line to `tell`.

    Returns the exit codes of the ranks that failed by themselves, negative for a signal; none when all is well. When
    one fails, the others get LOST_GRACE_S to end; on an exception (Ctrl-C) all are asked to stop, and killed after
    STOP_GRACE_S. The signals `pass_on` go to the ranks, whose answer counts. None is left when this returns or raises;
    when this process is killed, they stop as on an exception.
    """
    clean = {k: v for k, v in environment.items() if k not in RANK_VARIABLES} | {OWN: "1"}
    # A rank finds the packages that this process finds, also those that were put on its path while it ran.
    clean["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    lines: queue.Queue[Line] = queue.Queue()
    processes: list[subprocess.Popen[str]] = []
    threads: list[threading.Thread] = []
    places = _places(count)
    try:
        for rank, place in enumerate(places):
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer", *arguments],
                env={**clean, **place},
                stdin=subprocess.PIPE,  # nothing is sent: it is at its end when this process is, see `end_with_parent`
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # a terminal's Ctrl-C is ours to pass on
            )
            processes.append(process)
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                reader = threading.Thread(
                    target=_read, args=(stream, rank, stream is process.stderr, lines), daemon=True
                )
                reader.start()
                threads.append(reader)
        with _passing_on(pass_on, processes):
            failed = _follow(processes, lines, tell)
    except BaseException:
        _stop(processes)
        raise
    finally:
        _end(processes)
        for thread in threads:
            thread.join(timeout=5)
        while not lines.empty():
            tell(lines.get())
    return failed


def end_with_parent() -> None:
    """Stop when the process is gone that started this one by `run_ranks`, even by SIGKILL; else this does nothing."""
    if os.environ.pop(OWN, None) is None:
        return

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # whose readers are gone: a line would be an error
            os.dup2(nowhere, stream.fileno())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STOP_GRACE_S)
        os.killpg(os.getpid(), signal.SIGKILL)  # the session that it was started in: with its loading workers

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def error_of(failed: Mapping[int, int], said: Sequence[Line]) -> TrainerError:
    """What ranks that told their events failed of: the user's error as a rank said it.

    Of any other, the first failed rank's output goes to stderr.
    """
    for line in said:
        if line.text.startswith(contract.EVENT_MARK):
            event = json.loads(line.text.removeprefix(contract.EVENT_MARK))
            if event["event"] == contract.FAILED and event["exit_code"] == contract.EXIT_BAD_INPUT:
                return TrainerError(event["error"], event["hint"])
    print(*(line.text for line in said if line.rank == min(failed)), sep="\n", file=sys.stderr)
    return TrainerError(f"rank {min(failed)} of those that were started here has failed")


def _places(count: int) -> list[dict[str, str]]:
    """Each rank's variables as torchrun would set them; none for a single process, which needs no peers."""
    if count == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _read(stream: IO[str], rank: int, stderr: bool, lines: queue.Queue[Line]) -> None:
    with stream:
        for text in stream:
            lines.put(Line(rank, stderr, text.rstrip("\n")))


def _follow(
    processes: list[subprocess.Popen[str]], lines: queue.Queue[Line], tell: Callable[[Line], None]
) -> dict[int, int]:
    """Pass lines on until every rank has ended, or the time of those that are left is over; who failed, and how."""
    until = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        with contextlib.suppress(queue.Empty):
            tell(lines.get(timeout=0.1))
        if until == float("inf") and any(process.poll() for process in processes):
            until = time.monotonic() + LOST_GRACE_S
    return {rank: code for rank, process in enumerate(processes) if (code := process.poll())}


@contextlib.contextmanager
def _passing_on(signals: Sequence[signal.Signals], processes: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    def pass_on(number: int, _frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.terminate()
    until = time.monotonic() + STOP_GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0, until - time.monotonic()))


def _end(processes: list[subprocess.Popen[str]]) -> None:
    """Kill what is left, with the processes that it started."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
