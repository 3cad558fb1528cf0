"""Processes of the ranks of one machine: start, output, stop."""

import contextlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from trainer import contract
from trainer.config.strategies import DEFAULT_STRATEGY, traits_of
from trainer.errors import TrainerError

PEER_GRACE_S = 10.0  # for ranks whose peer has failed, to report it and exit
STDERR_LINES = 100  # of a failed rank
IN_A_JOB_GRACE_S = 2 * contract.MAX_GRACE_S  # in a job the agent kills what remains, and it waits less
PARENT_VARIABLE = "TRAINER_RANK_OF_PARENT"  # set for ranks that must end with their parent
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Line:
    """A line of a rank's stdout or stderr, without its newline."""

    rank: int
    stderr: bool
    text: str


def ranks_of(device: str, parallel: str = DEFAULT_STRATEGY) -> int:
    """Return the ranks of this machine for --device: one per GPU number, or one for all of them (--parallel dp)."""
    return 1 if traits_of(parallel).one_process else device.count(",") + 1


def run_ranks(
    arguments: Sequence[str],
    rank_environments: Sequence[Mapping[str, str]],
    environment: Mapping[str, str],
    on_line: Callable[[Line], None],
    forwarded: Sequence[signal.Signals] = (),
    peer_failed: Callable[[], bool] = lambda: False,
) -> dict[int, int]:
    """Run `python -m trainer ARGUMENTS` once per rank, and return the exit codes of failed ranks.

    `rank_environments` are each rank's variables, see `local_ranks`. `on_line` receives every line of output. The
    signals `forwarded` are forwarded to the ranks.

    Exit codes are negative for a signal. After a failure, here or on another machine (`peer_failed`), the other ranks
    get PEER_GRACE_S to exit. On an exception (Ctrl-C), and if this process is killed, all ranks get SIGTERM, and
    SIGKILL after `stop_grace_s`. No rank runs any more when this returns or raises.
    """
    clean = {k: v for k, v in environment.items() if k not in RANK_VARIABLES} | {PARENT_VARIABLE: "1"}
    # Ranks import from the same paths, also from those added at run time.
    clean["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    lines: queue.Queue[Line] = queue.Queue()
    processes: list[subprocess.Popen[str]] = []
    threads: list[threading.Thread] = []

    def forward(number: int, _frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    try:
        for rank, own in enumerate(rank_environments):
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer", *arguments],
                env={**clean, **own},
                stdin=subprocess.PIPE,  # closes when this process ends, see `end_with_parent`
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # keeps a terminal's Ctrl-C from the ranks
            )
            processes.append(process)
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                source = (stream, rank, stream is process.stderr, lines)
                reader = threading.Thread(target=_read, args=source, daemon=True)
                reader.start()
                threads.append(reader)
        with signal_handlers(forward, forwarded):
            failed = _follow(processes, lines, on_line, peer_failed)
    except BaseException:
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + stop_grace_s()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0, deadline - time.monotonic()))
        raise
    finally:
        _kill(processes)
        for thread in threads:
            thread.join(timeout=5)
        while not lines.empty():
            on_line(lines.get())
    return failed


def stop_grace_s() -> float:
    """Return the seconds in which ranks must exit after SIGTERM; trainer/contract.py has the order of all limits."""
    return IN_A_JOB_GRACE_S if contract.JOB_ID in os.environ else contract.STOP_GRACE_S


def end_with_parent() -> None:
    """In a rank of `run_ranks`: stop when the parent process ends, also by SIGKILL."""
    if os.environ.pop(PARENT_VARIABLE, None) is None:
        return

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        devnull = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # their pipes are broken
            os.dup2(devnull, stream.fileno())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(stop_grace_s())
        os.killpg(os.getpid(), signal.SIGKILL)  # with its dataloader workers

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def rank_error(failed: Mapping[int, int], output: Sequence[Line]) -> TrainerError:
    """Return the first error that the ranks reported in an event; without one, that of a rank that was not stopped.

    Unless it is bad input, the last lines of that rank's stderr are printed.
    """
    mark = contract.EVENT_MARK
    marked = [line.text.removeprefix(mark) for line in output if line.text.startswith(mark)]
    failures = [event for event in map(json.loads, marked) if event["event"] == contract.FAILED]
    causes = [event for event in failures if not event["echo"]]
    first = min(
        causes, key=lambda event: (event["exit_code"] != contract.EXIT_BAD_INPUT, event["time"]), default=None
    )
    if first and first["exit_code"] == contract.EXIT_RUN_ME_AGAIN:
        return TrainerError("a signal stopped the training after a checkpoint", "to continue, pass resume")
    if first and first["exit_code"] == contract.EXIT_BAD_INPUT:
        return TrainerError(first["error"], first["hint"])
    echoes = {event["rank"] for event in failures}
    # NCCL's watchdog aborts a rank after another one exits.
    ended = min(failed, key=lambda rank: (rank in echoes, failed[rank] == -signal.SIGABRT))
    rank = first["rank"] if first else ended
    code = failed[ended]
    stderr = [line.text for line in output if line.stderr and line.rank == rank]
    print(*stderr[-STDERR_LINES:], sep="\n", file=sys.stderr)
    if first:
        return TrainerError(first["error"], first["hint"])
    return TrainerError(
        f"rank {rank} ended with " + (signal.Signals(-code).name if code < 0 else f"exit {code}")
    )


def free_port() -> int:
    """Return a free TCP port of this machine, below those that Linux gives to outgoing connections."""
    for port in random.Random().sample(range(10_000, 20_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise TrainerError(
        "no free TCP port found between 10000 and 20000", "check the limits of this container or sandbox"
    )


def local_ranks(count: int) -> list[dict[str, str]]:
    """Return each rank's variables, as torchrun sets them; none for a single process."""
    if count == 1:
        return [{}]
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _read(stream: IO[str], rank: int, stderr: bool, lines: queue.Queue[Line]) -> None:
    with stream:
        for text in stream:
            lines.put(Line(rank, stderr, text.rstrip("\n")))


def _follow(
    processes: list[subprocess.Popen[str]],
    lines: queue.Queue[Line],
    on_line: Callable[[Line], None],
    peer_failed: Callable[[], bool],
) -> dict[int, int]:
    """Forward lines until every rank exits or its grace is over; return the exit codes of failed ranks."""
    deadline = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            on_line(lines.get(timeout=0.1))
        if deadline == float("inf") and (any(process.poll() for process in processes) or peer_failed()):
            deadline = time.monotonic() + PEER_GRACE_S
    return {rank: code for rank, process in enumerate(processes) if (code := process.poll())}


@contextlib.contextmanager
def signal_handlers(handler: Any, signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Handle the signals by `handler` inside the context, but not a SIGHUP that nohup ignores."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = [number for number in signals if not (number == signal.SIGHUP and is_ignored)]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _kill(processes: list[subprocess.Popen[str]]) -> None:
    """Kill the remaining ranks with their child processes."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
