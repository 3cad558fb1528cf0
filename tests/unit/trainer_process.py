"""Trainer processes of the tests: forked from a server that has imported torch, or new interpreters.

A forked process has its own folder, environment, pipes and exit code. It starts in milliseconds, because it does not
import torch. It has the server's seed of string hashes and /proc/PID/environ.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import IO, Any, NamedTuple
from unittest import mock

from trainer.distributed import spawn

ROOT = Path(__file__).parents[2]
_CONTEXT = multiprocessing.get_context("forkserver")
# torch's optimizers import torch._dynamo at their first use, which is slow
_PRELOAD = ["torch._dynamo", "trainer.engine.loop", "trainer.cli", "trainer.bench.verify", "trainer.plots"]
_PRELOAD += ["trainer.inference.validate", "trainer.inference.predict", "matplotlib.figure", "pytest"]
_PRELOAD += ["matplotlib.backends.backend_agg", "trainer.bench.scaling", "trainer.bench.profile"]
_PRELOAD += ["trainer.detectors.torchvision_nets", "trainer.detectors.dfine"]
_PRELOAD += ["tests.unit.server_setup"]  # the last one

_PLOTS = "PLOTS_IN_TESTS"  # in the environment of a forked trainer and of the ranks that it starts
TINY = str(ROOT / "tests/unit/tiny.yaml")


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Forked:
    """`python -m trainer ...`, `python FILE ...` or `python -c TEXT ...`, with the interface of subprocess.Popen."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: IO[str] | int | None = None,
        stderr: IO[str] | int | None = None,
        preexec_fn: Callable[[], object] | None = None,
        start_new_session: bool = False,
        **text: Any,
    ) -> None:
        self.args = args
        self.stdin, inp = self._pipe(stdin, 0)
        self.stdout, out = self._pipe(stdout, 1)
        self.stderr, err = self._pipe(stderr, 2)
        ends = {number: Connection(end) for number, end in enumerate((inp, out, err)) if end is not None}
        started, starts = _CONTEXT.Pipe(duplex=False)
        where = str(cwd or Path.cwd()), dict(os.environ if env is None else env)
        how = ends, starts, start_new_session, preexec_fn
        self._process = _CONTEXT.Process(target=_become, args=(args[1:], *where, *how))  # type: ignore[attr-defined]
        self._process.start()
        for end in (starts, *ends.values()):
            end.close()
        with started:  # closed by the process when it is set up or has ended
            started.poll(None)

    @staticmethod
    def _pipe(wanted: IO[str] | int | None, number: int) -> tuple[IO[str] | None, int | None]:
        """Return this process's end of a pipe (None without PIPE), and the forked process's file descriptor."""
        if wanted is None:
            return None, None
        if wanted != PIPE:
            return None, os.dup(wanted.fileno())
        reads, writes = os.pipe()
        mine, other = (reads, writes) if number else (writes, reads)
        return open(mine, "r" if number else "w", encoding="utf-8", errors="replace"), other  # noqa: PTH123

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        texts = ["", ""]

        def read(k: int, stream: IO[str]) -> None:
            with stream:
                texts[k] = stream.read()

        if self.stdin:
            self.stdin.close()
        streams = enumerate((self.stdout, self.stderr))
        threads = [
            threading.Thread(target=read, args=(k, s), daemon=True) for k, s in streams if s and not s.closed
        ]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join()
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# Replaces subprocess in trainer.distributed.spawn, so that a trainer's own ranks are forked too.
FORKING = SimpleNamespace(Popen=Forked, PIPE=PIPE, TimeoutExpired=subprocess.TimeoutExpired)


def _start_server() -> None:
    """Start the forkserver, which also forks the dataloader workers."""
    _CONTEXT.set_forkserver_preload(_PRELOAD)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", GOMP_SPINCOUNT="3000", PYTHONPATH=path):
        multiprocessing.forkserver.ensure_running()


def _become(
    args: Sequence[str],
    folder: str,
    environment: dict[str, str],
    ends: dict[int, Connection],
    starts: Connection,
    session: bool,
    before: Callable[[], object] | None,
) -> None:
    """Set the forked process up like a new interpreter, and run its program."""
    import numpy as np
    import torch

    if session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, end in ends.items():
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    faulthandler.enable(2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    np.random.seed()
    tempfile.tempdir = None  # was set from the server's environment
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    # Its ranks and dataloader workers are forked from the same server.
    spawn.subprocess = FORKING  # type: ignore[assignment, misc]
    server = multiprocessing.forkserver._forkserver
    server.ensure_running = multiprocessing.forkserver.ensure_running = lambda: None
    if _PLOTS not in environment:
        _omit_plots()
    if before:
        before()
    starts.close()
    try:
        _run(args)
    finally:
        atexit._run_exitfuncs()


def _omit_plots() -> None:
    """Skip the charts of a training, which are slow."""
    import trainer.plots

    trainer.plots.plot_results = lambda *_: None
    for drawings in trainer.plots.DRAWINGS.values():
        drawings.labels = drawings.metric = lambda *_: None  # type: ignore[attr-defined]


def _run(args: Sequence[str]) -> None:
    """Run the program that the interpreter's arguments name."""
    kind, *rest = args
    if kind in ("-m", "-c"):
        name, *rest = rest
        sys.argv = [kind, *rest]
        sys.path.insert(0, str(Path.cwd()))
    if kind == "-m":
        assert name == "trainer"
        from trainer.__main__ import main

        main()
    elif kind == "-c":
        exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [kind, *rest]
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(
            str(Path(kind).absolute()), run_name="__main__"
        )  # dataloader workers import it by its path


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CLUSTER_")}
    return {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def ranks(count: int, nodes: int = 1) -> list[dict[str, str]]:
    """Return the environment of each of `count` ranks; {} for a single process."""
    if count == 1:
        return [{}]
    each = count // nodes
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(each)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(spawn.free_port())}
    return [
        {**shared, "RANK": str(r), "LOCAL_RANK": str(r % each), "GROUP_RANK": str(r // each)}
        for r in range(count)
    ]


def start(
    cwd: Path,
    environments: list[dict[str, str]],
    *arguments: str,
    program: Sequence[str] = ("-m", "trainer"),
    stderr: IO[str] | int = PIPE,
    process: type = Forked,
    plots: bool = False,
    preexec_fn: Callable[[], object] | None = None,
    **more: str,
) -> list[Any]:
    """Start `trainer ARGUMENTS` or another Python program in each environment, without charts unless `plots`."""
    more |= {_PLOTS: "1"} if plots else {}
    command = [sys.executable, *program, *map(str, arguments)]
    pipes = {"stdout": PIPE, "stderr": stderr, "text": True, "preexec_fn": preexec_fn}
    return [process(command, cwd=cwd, env=environment(**more, **own), **pipes) for own in environments]


# The same with new interpreters.
exec_trainer = functools.partial(start, process=subprocess.Popen)


def wait(processes: list[Any], timeout_s: float = 240, code: int | None = None) -> list[Ended]:
    """Wait for the processes, kill them on a timeout, and return their results; check their exit code."""
    try:
        texts = [p.communicate(timeout=timeout_s) for p in processes]
    finally:
        for p in processes:
            p.kill()
    ended = [Ended(p.returncode, *text) for p, text in zip(processes, texts, strict=True)]
    assert code is None or {each.returncode for each in ended} == {code}, ended
    return ended


def run(cwd: Path, *arguments: str, code: int | None = None, **more: Any) -> Ended:
    """Run `trainer ARGUMENTS` as a single process; check its exit code if it is given."""
    return wait(start(cwd, [{}], *arguments, **more), code=code)[0]


def call(
    program: Callable[..., object], cwd: Path, environments: list[dict[str, str]], *arguments: str
) -> list[Ended]:
    """Run a function of a test in each environment; its processes must exit with 0."""
    text = f"import sys; from {program.__module__} import {program.__name__} as p; p(*sys.argv[1:])"
    return wait(start(cwd, environments, *arguments, program=("-c", text)), code=0)


def wait_until(done: Callable[[], bool], *processes: Any, timeout_s: float = 180) -> None:
    """Wait until `done()`; the processes must not end before."""
    until = time.monotonic() + timeout_s
    while not done():
        assert all(p.poll() is None for p in processes), wait([*processes])
        assert time.monotonic() < until
        time.sleep(0.01)


def processes_in(folder: Path) -> list[int]:
    """Return the pids of other processes with this current folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if (entry / "cwd").readlink() == folder and entry.name != str(os.getpid()):
                found.append(int(entry.name))
    return found


if multiprocessing.forkserver.get_inherited_fds() is None:  # not in a forked process
    _start_server()  # before a dataloader starts a server without the preloaded modules
