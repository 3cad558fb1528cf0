"""The agent: runs the setup commands and the ranks of a node, masks secrets, finds failing and idle ranks.

    python3 agent.py [-m MODULE | --no-python PROGRAM | SCRIPT] ARGUMENTS...

The agent replaces torchrun: it reads torchrun's options from the same variables (`PET_*`) and sets the same variables
for each rank. torchrun itself maps every failure of a rank to exit code 1, terminates on SIGUSR2, and imports torch on
every node. docs/reference/contract.md has the variables, the files and the exit codes.

The agent needs Python 3.8 and the standard library, so any container image that can run PyTorch can run it. Ranks
import this file as `sitecustomize` (see `record_exceptions`).
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from subprocess import DEVNULL, PIPE, STDOUT

TYPE_CHECKING = False  # the import of `typing` would delay each rank's start by some milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from io import FileIO
    from types import TracebackType
    from typing import Any, Dict

    Fields = Dict[str, Any]

SIGNAL_NAMES = {int(number): number.name for number in signal.Signals}
EVENT_MARK = "::cluster "
EXIT_NODE = 71  # the node cannot run ranks: the port is in use, or the program does not exist
EXIT_RUN_DIR = 73  # the run directory cannot be written to
EXIT_RUN_ME_AGAIN = 75

HEARTBEAT_S = 2.0
#: Time for the ranks to exit after SIGTERM: after a failure, and after a request to stop.
FAILED_GRACE_S = 10.0
STOP_GRACE_S = 60.0
#: The node's script updates its file every 2 s. Without a change for this time, the script is dead.
SCRIPT_TIMEOUT_S = 30.0
#: A master needs seconds to start: earlier failures to connect are not reported.
UNREACHABLE_AFTER_S = 4.0
REFUSED_AFTER_S = 20.0
#: A progress bar overwrites its line. Its state is written to the log at this interval.
PROGRESS_BAR_S = 5.0
#: A rank that uses less than this share of a core, and prints nothing, makes no progress.
IDLE_SHARE = 0.05
#: The signal at which a rank's Python writes its stack: unused by Linux, Python and torch.
STACK_SIGNAL = 50
#: Shorter values of secrets are not masked, because they would mask unrelated text.
SECRET_MIN_LENGTH = 4

#: Errors of gloo, NCCL and torch's TCPStore after the loss of a peer: a consequence of another rank's failure.
SECONDARY = re.compile(
    r"Dist(Store|Network)Error: |(RuntimeError|DistBackendError): .*(Connection (was likely )?(closed|reset|refused)"
    r"|Broken pipe|Socket closed|[Tt]imed out waiting|remote process exited|ncclRemoteError"
    r"|NCCL communicator was aborted)"
)


class Settings:
    """The node's settings from the environment. Raises SystemExit for a missing or invalid variable."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        try:
            self.nodes = int(environment["PET_NNODES"])
            self.node_rank = int(environment["PET_NODE_RANK"])
            self.ranks = int(environment["PET_NPROC_PER_NODE"])
            self.port = int(environment["PET_MASTER_PORT"])
            self.nodes_on_host = int(environment.get("CLUSTER_NODES_ON_HOST") or 1)
            self.master = environment["PET_MASTER_ADDR"]
            self.job = environment["CLUSTER_JOB_ID"]
            self.attempt = environment["CLUSTER_ATTEMPT"]
            self.run_dir = environment["CLUSTER_RUN_DIR"]
        except (KeyError, ValueError) as error:
            raise SystemExit("agent: a variable is missing or is not a number: {!r}".format(error)) from None
        self.name = environment.get("CLUSTER_NODE") or "node-%d" % self.node_rank
        names = [name for name in environment.get("CLUSTER_SECRETS", "").split(",") if name]
        self.secrets = [environment[name] for name in names if environment.get(name)]
        self.folder = os.path.join(self.run_dir, "attempt-" + self.attempt)
        self.stall_timeout_s = float(environment.get("CLUSTER_STALL_TIMEOUT") or 0)

    def path(self, ending: str) -> str:
        """Return the path of a file of this node in the attempt's folder."""
        return f"{self.folder}/{self.name}{ending}"


class Log:
    """The node's log, one log per rank, and the console. A full disk does not stop the ranks."""

    def __init__(self, settings: Settings) -> None:
        parts = {part for value in settings.secrets for part in value.splitlines() if len(part) >= SECRET_MIN_LENGTH}
        self._secrets = sorted((part.encode() for part in parts), key=len, reverse=True)
        self._lock = threading.Lock()
        self.error = ""
        folder = os.path.join(settings.folder, "ranks", settings.name)
        os.makedirs(folder, exist_ok=True)
        self._all = open(settings.path(".log"), "ab", buffering=0)
        self._ranks = [open(os.path.join(folder, "%d.log" % rank), "ab", buffering=0) for rank in range(settings.ranks)]

    def line(self, text: bytes, local_rank: int | None = None) -> None:
        """Write one line of a rank, or of the agent, with secrets masked."""
        text = self._mask(text) + b"\n"
        shown = b"[%d] %s" % (local_rank, text) if local_rank else text
        with self._lock:
            if local_rank is not None:
                self._write(self._ranks[local_rank], text)
            self._write(self._all, shown)
            if EVENT_MARK.encode() not in text:
                with contextlib.suppress(OSError):
                    sys.stdout.buffer.write(shown)
                    sys.stdout.buffer.flush()

    def message(self, text: str) -> None:
        """Write a line of the agent itself."""
        self.line(("agent: " + text).encode())

    def masked(self, text: str) -> str:
        """Return the text with `***` in place of secrets."""
        return self._mask(text.encode(errors="replace")).decode(errors="replace")

    def _mask(self, text: bytes) -> bytes:
        for value in self._secrets:
            text = text.replace(value, b"***")
        return text

    def _write(self, file: FileIO, data: bytes) -> None:
        try:
            file.write(data)
        except OSError as error:
            self.error = "{}: {}".format(file.name, error.strerror)


class Status:
    """The node's status file, which is replaced atomically."""

    def __init__(self, settings: Settings) -> None:
        self._path = settings.path(".json")
        self.written_at = 0.0
        self.fields = {"phase": "starting", "pid": os.getpid(), "started_at": round(time.time(), 3)}

    def write(self, **fields: object) -> None:
        """Change fields and write the file."""
        self.fields.update(fields, heartbeat=round(time.time(), 3))
        self.written_at = time.monotonic()
        text = json.dumps(self.fields, separators=(",", ":")) + "\n"
        partial = self._path + ".tmp"
        try:
            with open(partial, "w") as file:
                file.write(text)
            os.replace(partial, self._path)
        except OSError:  # a full disk has no space for another file, but the old one can be overwritten
            with contextlib.suppress(OSError):
                os.remove(partial)
            with contextlib.suppress(OSError), open(self._path, "r+") as file:
                file.write(text)
                file.truncate()


class Rank:
    """One rank: its process, its output, and its exit `code` (negative: the number of a signal)."""

    def __init__(self, number: int, local_rank: int, command: list[str], environment: dict[str, str], log: Log) -> None:
        self.number, self.local_rank = number, local_rank
        self.code: int | None = None
        self.ended_at = 0.0
        self.event: Fields | None = None
        self.stopped_before = False
        self.out_of_memory = False
        self.output_at = time.monotonic()
        self._record = environment["CLUSTER_RANK_RECORD"]
        self.process = subprocess.Popen(
            command, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, preexec_fn=_in_rank
        )
        self.reader = threading.Thread(target=self.read, args=(log,), daemon=True)
        self.reader.start()

    def read(self, log: Log) -> None:
        """Copy the rank's output to the log, line by line, until the end of the output."""
        assert self.process.stdout is not None
        out = self.process.stdout.fileno()
        pending, written = b"", time.monotonic()
        for chunk in iter(lambda: os.read(out, 1 << 16), b""):
            self.output_at = time.monotonic()
            *lines, pending = (pending + chunk).split(b"\n")
            if b"\r" in pending and time.monotonic() - written > PROGRESS_BAR_S:
                bar, _, pending = pending.rpartition(b"\r")
                lines += [bar] if bar else []
            for line in lines:
                self._line(line, log)
                written = time.monotonic()
        if pending:
            self._line(pending, log)

    def _line(self, line: bytes, log: Log) -> None:
        line = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]  # a progress bar overwrites its line; keep the last state
        if EVENT_MARK.encode() in line:
            with contextlib.suppress(ValueError):
                event = json.loads(line.partition(EVENT_MARK.encode())[2].decode(errors="replace"))
                if isinstance(event, dict) and event.get("event") == "failed" and event.get("error"):
                    self.event = event
        log.line(line, self.local_rank)

    def stack(self) -> list[str]:
        """Return the stack of the rank's main thread, newest call first; [] if it is not Python."""
        path = self._record + ".stack"
        with contextlib.suppress(OSError, ValueError), open("/proc/%d/status" % self.process.pid) as file:
            caught = re.search(r"^SigCgt:\s*(\w+)", file.read(), re.MULTILINE)
            if caught and int(caught.group(1), 16) >> (STACK_SIGNAL - 1) & 1:
                size = os.stat(path).st_size
                os.kill(self.process.pid, STACK_SIGNAL)
                for _ in range(50):
                    time.sleep(0.02)
                    with open(path) as dump:
                        dump.seek(size)
                        lines = dump.read().splitlines()
                    if lines and len(lines) > 1:
                        return [line.strip() for line in lines if line.startswith("  File ")]
        return []

    def exception(self) -> Fields | None:
        """Return the uncaught exception that the rank recorded, or None."""
        with contextlib.suppress(OSError, ValueError), open(self._record) as file:
            found: Fields = json.load(file)
            return found
        return None

    def failure(self) -> Fields | None:
        """Return the rank's failure (rank, time, error, hint, exit_code, secondary), or None."""
        if self.code in (None, 0, EXIT_RUN_ME_AGAIN):
            return None
        found: Fields = {"rank": self.number, "local_rank": self.local_rank, "time": self.ended_at, "hint": ""}
        found.update(exit_code=self.code if self.code > 0 else 128 - self.code, secondary=False)
        raised, number = self.exception(), -self.code
        if self.event is not None:
            found.update(error=str(self.event["error"]), hint=str(self.event.get("hint") or ""))
            found["secondary"] = bool(self.event.get("echo"))
            if isinstance(self.event.get("time"), (int, float)):
                found["time"] = min(self.ended_at, self.event["time"])
        elif raised is not None:  # also if the rank was stopped after it had raised
            found.update(error=raised["error"], time=raised["time"], secondary=bool(SECONDARY.match(raised["error"])))
            found["exit_code"] = max(1, self.code)
        elif self.stopped_before and number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGUSR2):
            return None
        elif number > 0:
            name = SIGNAL_NAMES.get(number, "signal %d" % number)
            found["error"] = "out of memory: the kernel killed it" if self.out_of_memory else "killed by " + name
            found["secondary"] = number == signal.SIGABRT  # torch aborts a rank that has lost its peers
        else:
            found["error"] = "exit code %d" % self.code
            found["secondary"] = self.stopped_before
        return found


def first_failure(ranks: Iterable[Rank]) -> Fields | None:
    """Return the first failure of a node's ranks, causes first, or None. Its `others` are the rest, in order."""
    failures = [found for found in (rank.failure() for rank in ranks) if found is not None]
    failures.sort(key=lambda found: (found["secondary"], found["time"]))
    others = [{"rank": found["rank"], "error": found["error"]} for found in failures[1:]]
    return dict(failures[0], others=others) if failures else None


def exit_code(ranks: Iterable[Rank], failure: Fields | None, checkpoint_requested: bool) -> int:
    """Return the node's exit code from those of its ranks."""
    codes = [rank.code for rank in ranks if rank.code]
    if not codes:
        return 0
    if checkpoint_requested or (failure is None and EXIT_RUN_ME_AGAIN in codes):
        return EXIT_RUN_ME_AGAIN
    if failure is not None:
        return int(failure["exit_code"])
    return codes[0] if codes[0] > 0 else 128 - codes[0]


def rank_command(arguments: list[str]) -> list[str]:
    """Return the command of a rank from torchrun's arguments."""
    if not arguments or arguments in (["-m"], ["--no-python"]):
        raise SystemExit("agent: no program: agent.py [-m MODULE | --no-python PROGRAM | SCRIPT] ARGUMENTS...")
    if arguments[0] == "--no-python":
        return arguments[1:]
    if arguments[0].startswith("-") and arguments[0] != "-m":
        raise SystemExit("agent: {}: expected -m MODULE, --no-python PROGRAM or a script".format(arguments[0]))
    return [sys.executable, "-u", *arguments]


def rank_variables(settings: Settings, local_rank: int, hooks: str) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, and the path of the rank's exception in `hooks`."""
    rank = settings.node_rank * settings.ranks + local_rank
    world = settings.nodes * settings.ranks
    values = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": settings.ranks,
        "GROUP_RANK": settings.node_rank,
        "GROUP_WORLD_SIZE": settings.nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": settings.master,
        "MASTER_PORT": settings.port,
        "TORCHELASTIC_RUN_ID": settings.job,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "CLUSTER_RANK_RECORD": os.path.join(hooks, "rank-%d.json" % local_rank),
    }
    return {name: str(value) for name, value in values.items()}


def node_environment(settings: Settings, environment: Mapping[str, str], hooks: str) -> dict[str, str]:
    """Return the variables that all ranks of the node share: threads, error handling, folder of `sitecustomize`."""
    values = dict(environment)
    cores = len(os.sched_getaffinity(0))
    values.setdefault("OMP_NUM_THREADS", str(max(1, cores // (settings.ranks * settings.nodes_on_host))))
    values.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    values.setdefault("PYTHONFAULTHANDLER", "1")
    values["PYTHONUNBUFFERED"] = "1"
    values["PYTHONPATH"] = os.pathsep.join(part for part in (hooks, environment.get("PYTHONPATH")) if part)
    return values


def watch_master(settings: Settings, log: Log, ended: threading.Event) -> None:
    """Report whether the master's port is reachable, and why not, until it accepts a connection."""
    where = "%s:%d" % (settings.master, settings.port)
    started, last = time.monotonic(), None
    while not ended.is_set():
        waited_s = time.monotonic() - started
        reachable, listening, why = True, False, ""
        try:
            socket.create_connection((settings.master, settings.port), timeout=5).close()
            listening = True
        except ConnectionRefusedError:
            why = "Connection refused" if waited_s > REFUSED_AFTER_S else ""
        except socket.timeout:
            reachable, why = False, "no answer within 5 s"
        except OSError as error:
            reachable, why = False, error.strerror or str(error)
        if last != (reachable, listening, why) and (reachable or waited_s > UNREACHABLE_AFTER_S):
            last = (reachable, listening, why)
            event = {"event": "joining", "time": round(time.time(), 3), "node": settings.node_rank, "master": where}
            event.update(reachable=reachable, listening=listening, why=log.masked(why))
            log.line((EVENT_MARK + json.dumps(event, separators=(",", ":"))).encode())
        if listening:
            return
        ended.wait(0.5)


def is_taken(port: int) -> bool:
    """Return whether another program uses a port of this node."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def count_memory_kills() -> int:
    """Return the number of out-of-memory kills in this node's control group, or 0 if it cannot be read."""
    files = ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"]  # of a container: v2, v1
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                files.append("/sys/fs/cgroup{}/memory.events".format(path.rstrip("/")))
            elif "memory" in controllers.split(","):
                files.append("/sys/fs/cgroup/memory{}/memory.oom_control".format(path.rstrip("/")))
    total = 0
    for name in files:
        with contextlib.suppress(OSError), open(name) as file:
            found = re.search(r"^oom_kill (\d+)", file.read(), re.MULTILINE)
            total = max(total, int(found.group(1)) if found else 0)
    return total


#: Blocked in all threads: the main loop receives them one at a time, without the races of a handler.
SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2}


def place(stack: list[str]) -> Fields:
    """Return where a rank waits: `collective` of torch.distributed or "", newest `call`, `place` in the program."""
    found: Fields = {"collective": "", "call": "", "place": ""}
    for line in stack:
        match = re.match(r'File "(.*)", line (\d+) in (.*)', line)
        if match is None:
            continue
        path, number, function = match.groups()
        is_library = "-packages/" in path or "/lib/python3" in path or path.startswith("<")
        if "/torch/distributed/" in path or "/torch/nn/parallel/" in path or function == "backward":
            if function not in ("wrapper", "wait", "forward") and not function.startswith("_"):
                found["collective"] = function
        found["call"] = found["call"] or function
        if not is_library:
            found["place"] = "%s:%s" % (os.path.basename(path), number)
            break
    return found


def descendants(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir("/proc/%d/task" % parent):
                with open("/proc/%d/task/%s/children" % (parent, thread)) as file:
                    found += [int(child) for child in file.read().split()]
    return found


def resources(pid: int) -> tuple[float, int]:
    """Return the CPU time in seconds and the resident memory in bytes of a process and its descendants."""
    ticks = pages = 0
    for process in descendants(pid):
        with contextlib.suppress(OSError), open("/proc/%d/stat" % process, "rb") as file:
            values = file.read().rpartition(b")")[2].split()
            ticks += int(values[11]) + int(values[12])
            pages += int(values[21])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


def query_gpus(visible: str) -> list[Fields] | None:
    """Return the use of the GPUs in CUDA_VISIBLE_DEVICES, in its order; None if nvidia-smi does not answer.

    `use` (in percent), memory (bytes) and `temperature` (°C) are None if the GPU does not report them, as a MIG device.
    """
    units = {"use": 1, "memory": 1 << 20, "memory_total": 1 << 20, "temperature": 1}
    query = ["nvidia-smi", "--query-gpu=index,uuid,utilization.gpu,memory.used,memory.total,temperature.gpu"]
    query += ["--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, stdout=PIPE, stderr=DEVNULL, timeout=10, check=True)
        found: dict[str, Fields] = {}
        for line in done.stdout.decode().splitlines():
            index, uuid, *values = [field.strip() for field in line.split(",")]
            numbers = {key: int(value) * units[key] if value.isdigit() else None for key, value in zip(units, values)}
            found[index] = found[uuid] = dict({"gpu": index}, **numbers)
        if any(len(row) <= len(units) for row in found.values()):
            return None
        return [found.get(name) or dict(dict.fromkeys(units), gpu=name) for name in visible.split(",")]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


class Usage:
    """CPU, memory and GPU use of the node's ranks, sampled at every heartbeat."""

    def __init__(self, ranks: list[Rank], ended: threading.Event) -> None:
        self._ranks, self._at = ranks, time.monotonic()
        self._cpu: dict[int, float] = {}
        self._gpus: list[Fields] | None = []
        self._visible, self._ended = os.environ.get("CUDA_VISIBLE_DEVICES", ""), ended
        self.cpu = 0.0
        if self._visible:
            threading.Thread(target=self._watch_gpus, daemon=True).start()

    def _watch_gpus(self) -> None:
        while True:
            self._gpus = query_gpus(self._visible)
            if self._ended.wait(HEARTBEAT_S):
                return

    @property
    def gpus_are_active(self) -> bool:
        """Whether a GPU computes, or may compute because nvidia-smi does not report it."""
        return self._gpus is None or any(gpu["use"] is None or gpu["use"] > 0 for gpu in self._gpus)

    def sample(self) -> Fields:
        """Return the field `usage` of the status, and set `cpu`, the cores that the ranks use together."""
        now = time.monotonic()
        elapsed, self._at = max(0.1, now - self._at), now
        rows: list[Fields] = []
        gpus = self._gpus or []
        self.cpu = 0.0
        for rank in self._ranks:
            if rank.code is not None:
                continue
            seconds, memory = resources(rank.process.pid)
            cores = max(0.0, seconds - self._cpu.get(rank.number, 0.0)) / elapsed
            self._cpu[rank.number] = seconds
            self.cpu += cores
            gpu = gpus[rank.local_rank % len(gpus)] if gpus else {}
            rows.append(dict(gpu, rank=rank.number, cpu=round(cores, 2), rss=memory))
        with open("/proc/meminfo") as file:
            sizes = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+)", file.read(), re.MULTILINE))
        host = {"free": int(sizes["MemAvailable"]) << 10, "total": int(sizes["MemTotal"]) << 10}
        return {"ranks": rows, "host": host}


class StallWatch:
    """Finds out that the ranks of the node make no progress, and where they wait."""

    def __init__(self, settings: Settings, log: Log, status: Status, ranks: list[Rank]) -> None:
        self._timeout_s, self._log, self._status, self._ranks = settings.stall_timeout_s, log, status, ranks
        self._checked = self._active = time.monotonic()

    def check(self, usage: Usage) -> None:
        """Update the field `stall` of the status after a sample; once per stall, write the stacks to the log."""
        now = time.monotonic()
        if not self._timeout_s:
            return
        # A longer gap is a time in which this process was suspended, and the ranks were, too.
        if now - self._checked > 2 * HEARTBEAT_S:
            self._active += now - self._checked - HEARTBEAT_S
        self._checked = now
        running = [rank for rank in self._ranks if rank.code is None]
        if usage.cpu > IDLE_SHARE * len(running):
            self._active = now
        self._active = max([self._active, *(rank.output_at for rank in running)])
        stalled = now - self._active >= self._timeout_s
        if stalled and not self._status.fields.get("stall") and usage.gpus_are_active:
            self._active = now
        elif stalled != bool(self._status.fields.get("stall")):
            self._status.write(stall=self._report(running) if stalled else [])

    def _report(self, running: list[Rank]) -> list[Fields]:
        found = []
        for rank in running:
            stack = rank.stack()
            self._log.message("rank %d: no output and no activity for %d s" % (rank.number, self._timeout_s))
            for line in stack:
                self._log.message("rank %d:   %s" % (rank.number, line))
            found.append(dict(place(stack), rank=rank.number))
        return found


class Setup:
    """The setup commands of a job, run once per node in a virtual environment that later jobs use again."""

    def __init__(self, settings: Settings, log: Log, status: Status, environment: dict[str, str]) -> None:
        self._settings, self._log, self._status = settings, log, status
        self._text, self._folder = environment["CLUSTER_SETUP"], environment["CLUSTER_SETUP_DIR"]
        self._environment = environment
        environment["VIRTUAL_ENV"] = self._folder
        environment["PATH"] = os.path.join(self._folder, "bin") + os.pathsep + environment.get("PATH", os.defpath)
        self.python = os.path.join(self._folder, "bin", "python")

    def run(self) -> str:
        """Run the commands unless an earlier job has; return why they failed, or "". Raises OSError."""
        import fcntl

        event = {"event": "setup", "time": round(time.time(), 3), "node": self._settings.node_rank}
        self._log.line((EVENT_MARK + json.dumps(event, separators=(",", ":"))).encode())
        os.makedirs(self._folder, exist_ok=True)
        with open(os.path.join(self._folder, "setup.lock"), "w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # another node of this machine, or of the shared disk, sets it up
                    if self._stopped(1.0):
                        return "stopped while it waited for another node's setup"
            made = os.path.join(self._folder, "setup.done")
            with contextlib.suppress(OSError), open(made) as file:
                if file.read() == sys.version:
                    return ""
            self._make_environment()
            error = self._run_commands()
            if not error:
                with open(made, "w") as file:
                    file.write(sys.version)
            return error

    def _make_environment(self) -> None:
        """Make a virtual environment that also finds the packages of this interpreter."""
        import site
        import venv
        from importlib.util import find_spec

        for entry in set(os.listdir(self._folder)) - {"setup.lock"}:  # the folder itself may be a mount
            path = os.path.join(self._folder, entry)
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)
        has_pip = find_spec("pip") is not None
        venv.create(self._folder, symlinks=True, with_pip=not has_pip)
        library = "lib/python%d.%d/site-packages" % sys.version_info[:2]
        with open(os.path.join(self._folder, library, "image.pth"), "w") as file:
            file.write("\n".join(site.getsitepackages()) + "\n")
        if has_pip:  # a copy of it would take three seconds
            for name in ("pip", "pip3"):
                path = os.path.join(self._folder, "bin", name)
                with open(path, "w") as file:
                    file.write('#!/bin/sh\nexec "%s" -m pip "$@"\n' % self.python)
                os.chmod(path, 0o755)

    def _run_commands(self) -> str:
        shell = shutil.which("bash") or "sh"
        process = subprocess.Popen(
            [shell, "-ec", self._text],
            env=self._environment,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            preexec_fn=_in_rank,
            start_new_session=True,
        )
        last = [""]

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                text = line.rstrip(b"\r\n").rsplit(b"\r", 1)[-1]
                last[:] = [self._log.masked(text.decode(errors="replace")).strip() or last[0]]
                self._log.line(b"setup: " + text)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        while process.poll() is None:
            if self._stopped(0.2):
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return "setup: stopped"
        reader.join(5)
        return "setup: exit code %d: %s" % (process.returncode, last[0]) if process.returncode else ""

    def _stopped(self, timeout_s: float) -> bool:
        """Wait, and return whether this node is to stop."""
        if time.monotonic() - self._status.written_at >= HEARTBEAT_S:
            self._status.write()
        received = signal.sigtimedwait(SIGNALS - {signal.SIGCHLD}, timeout_s)
        return received is not None and received.si_signo in SIGNALS


class Agent:
    """Starts and supervises the ranks of one node."""

    def __init__(self, settings: Settings, log: Log, status: Status) -> None:
        self._settings, self._log, self._status = settings, log, status
        self._ranks: list[Rank] = []
        self._ended = threading.Event()
        self._checkpoint_requested = False
        self._stopping_since: float | None = None
        self._grace_s = STOP_GRACE_S
        self._stop_reason = ""
        self._memory_kills = count_memory_kills()
        self._script, self._script_changed = "", time.monotonic()

    def run(self, command: list[str], environment: dict[str, str], hooks: str) -> int:
        """Run the setup, start the ranks, and wait for their end; return the node's exit code."""
        error = ""
        if environment.get("CLUSTER_SETUP"):
            setup = Setup(self._settings, self._log, self._status, environment)
            self._status.write(phase="setup")
            try:
                error = setup.run()
            except OSError as failed:
                error = "setup: {}: {}".format(failed.filename, failed.strerror)
            if command[0] == sys.executable:
                command = [setup.python, *command[1:]]
        error = error or self._start(command, environment, hooks)
        if error:
            self._log.message("error: " + error)
            failure = {"rank": None, "time": round(time.time(), 3), "error": error, "secondary": False}
            self._report_end(EXIT_NODE, dict(failure, exit_code=EXIT_NODE))
            return EXIT_NODE
        threading.Thread(target=watch_master, args=(self._settings, self._log, self._ended), daemon=True).start()
        self._status.write(phase="running")
        usage = Usage(self._ranks, self._ended)
        stall = StallWatch(self._settings, self._log, self._status, self._ranks)
        while any(rank.code is None for rank in self._ranks):
            received = signal.sigtimedwait(SIGNALS, HEARTBEAT_S / 2)
            if received is not None and received.si_signo in SIGNALS:  # after SIGCONT the number is not set
                self._handle_signal(received.si_signo)
            if self._script_is_dead():
                self._stop(STOP_GRACE_S, "the node's script outside of the container has died")
            if self._stopping_since is not None and time.monotonic() - self._stopping_since > self._grace_s:
                self._send(signal.SIGKILL)
            if time.monotonic() - self._status.written_at >= HEARTBEAT_S:
                self._status.write(usage=usage.sample())
                stall.check(usage)
        return self._finish()

    def _start(self, command: list[str], environment: Mapping[str, str], hooks: str) -> str:
        """Start the ranks; return why this node cannot run them, or ""."""
        settings = self._settings
        if settings.node_rank == 0 and is_taken(settings.port):
            return "port %d is already in use: EADDRINUSE" % settings.port
        for local_rank in range(settings.ranks):
            number = settings.node_rank * settings.ranks + local_rank
            variables = dict(environment, **rank_variables(settings, local_rank, hooks))
            try:
                self._ranks.append(Rank(number, local_rank, command, variables, self._log))
            except OSError as error:
                return "{}: {}".format(command[0], error.strerror)
        return ""

    def _script_is_dead(self) -> bool:
        """Return whether the node's script outside of the container is dead: nothing else would stop the container."""
        text = ""
        with contextlib.suppress(OSError), open(self._settings.path(".alive")) as file:
            text = file.read()
        if text != self._script or not text:  # no file without a container; an empty file on a full disk
            self._script, self._script_changed = text, time.monotonic()
        return time.monotonic() - self._script_changed > SCRIPT_TIMEOUT_S

    def _handle_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif number == signal.SIGUSR2:
            self._checkpoint_requested = True
            self._send(signal.SIGUSR2)
        else:
            self._stop(STOP_GRACE_S, SIGNAL_NAMES[number] + " received")

    def _reap(self) -> None:
        """Store the exit codes of ranks that have ended; after a failure stop the other ranks."""
        by_pid = {rank.process.pid: rank for rank in self._ranks}
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            rank = by_pid.get(pid)
            if rank is None or rank.code is not None:
                continue
            killed = os.WIFSIGNALED(wait_status)
            rank.code = -os.WTERMSIG(wait_status) if killed else os.WEXITSTATUS(wait_status)
            rank.process.returncode = rank.code
            rank.ended_at, rank.stopped_before = time.time(), self._stopping_since is not None
            if rank.code == -signal.SIGKILL:
                kills, before = count_memory_kills(), self._memory_kills
                rank.out_of_memory, self._memory_kills = kills > before, kills
            if rank.code not in (0, EXIT_RUN_ME_AGAIN):
                self._stop(FAILED_GRACE_S, "")
            elif rank.code == EXIT_RUN_ME_AGAIN:
                self._stop(STOP_GRACE_S, "", signals=False)

    def _stop(self, grace_s: float, why: str, signals: bool = True) -> None:
        """Send SIGTERM to the ranks; after `grace_s` they are killed."""
        if self._stopping_since is not None:
            return
        self._stopping_since, self._grace_s, self._stop_reason = time.monotonic(), grace_s, why
        if why:
            self._log.message(why + ": stopping the ranks")
        if signals:
            self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            if rank.code is None:
                os.kill(rank.process.pid, number)

    def _finish(self) -> int:
        """Kill remaining processes, complete the log, and report the end."""
        self._ended.set()
        kill_descendants()
        for rank in self._ranks:
            rank.reader.join(5)
        failure = first_failure(self._ranks)
        code = exit_code(self._ranks, failure, self._checkpoint_requested)
        if failure is not None:
            for fields in (failure, *failure["others"]):
                fields.update((key, self._log.masked(fields[key])) for key in ("error", "hint") if key in fields)
            if self._log.error:
                failure["error"] += "; the log is incomplete: " + self._log.error
            self._log.message("rank %d failed first: %s" % (failure["rank"], failure["error"]))
        elif code == EXIT_RUN_ME_AGAIN:
            events = [rank.event for rank in self._ranks if rank.event is not None]
            self._stop_reason = self._log.masked(str(events[0]["error"])) if events else self._stop_reason
        self._report_end(code, failure)
        return code

    def _report_end(self, code: int, failure: Fields | None) -> None:
        """Write how the node ended to the status file."""
        fields = {"phase": "exited", "exit_code": code, "ended_at": round(time.time(), 3), "failure": failure}
        self._status.write(reason=self._stop_reason, **fields)


def kill_descendants() -> None:
    """Kill the processes that the ranks have left. The agent is a subreaper: it inherits the children of each."""
    for _ in range(20):
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        children = [int(name) for name in os.listdir("/proc") if name.isdigit() and _parent(name) == os.getpid()]
        if not children:
            return
        for pid in children:
            with contextlib.suppress(OSError):  # it runs as another user
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _parent(pid: str) -> int:
    with contextlib.suppress(OSError), open("/proc/{}/stat".format(pid), "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])
    return 0  # the process has ended


def record_exceptions() -> None:
    """Install an excepthook that records this rank's uncaught exception, and a handler that writes its stack.

    It runs as `sitecustomize`, imports the container image's own, and records only in a rank's first Python process.
    """
    path = os.environ.pop("CLUSTER_RANK_RECORD", "")
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)
    if not path:
        return
    if os.environ.get("CLUSTER_STALL_TIMEOUT"):
        import faulthandler

        faulthandler.register(STACK_SIGNAL, open(path + ".stack", "w"), all_threads=False)
    before, main = sys.excepthook, os.getpid()

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == main and issubclass(kind, Exception):
            with contextlib.suppress(Exception):
                lines = str(error).strip().splitlines() or [""]
                text = "{}: {}".format(kind.__qualname__, lines[0]) if lines[0] else kind.__qualname__
                with open(path, "w") as file:
                    json.dump({"time": time.time(), "error": text}, file)
        before(kind, error, trace)

    sys.excepthook = record


_LIBC: Any = None  # set by `main`


def _in_rank() -> None:
    """Unblock signals, and have the kernel kill the rank when the agent dies; runs between fork and exec."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def main(arguments: list[str]) -> int:
    """Run the agent; return the node's exit code."""
    import ctypes  # not at the start of each rank, which imports this file

    global _LIBC
    settings = Settings(os.environ)
    command = rank_command(arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _LIBC = ctypes.CDLL(None)
    _LIBC.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    try:
        os.makedirs(settings.folder, exist_ok=True)
        status, log = Status(settings), Log(settings)
        hooks = tempfile.mkdtemp(prefix="clusterctl-")
        os.symlink(os.path.abspath(__file__), os.path.join(hooks, "sitecustomize.py"))
    except OSError as error:
        print("agent: {}: {}".format(error.filename, error.strerror), file=sys.stderr)
        return EXIT_RUN_DIR
    status.write()
    try:
        return Agent(settings, log, status).run(command, node_environment(settings, os.environ, hooks), hooks)
    finally:
        shutil.rmtree(hooks, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
elif __name__ == "sitecustomize":
    record_exceptions()
