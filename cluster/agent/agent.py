"""The agent: the program that runs on every node, starts the node's ranks and reports on them.

    python3 agent.py [-m MODULE | --no-python PROGRAM | SCRIPT] ARGUMENTS...

It takes torchrun's place on a node: it reads the same options from the same variables (`PET_*`) and gives each rank
the variables that torchrun gives. torchrun itself turns every end of a rank into its own exit code 1, dies of SIGUSR2,
and imports torch once more on every node. docs/contract.md has the variables, the files and the exit codes.

The agent needs Python 3.8 and the standard library, so any container image that can run PyTorch can run it. Ranks
import this file as `sitecustomize` (see `record_exceptions`).
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import json
import os
import re
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

TYPE_CHECKING = False  # as `typing` has it, whose import would cost every rank's start some milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from io import FileIO
    from types import TracebackType
    from typing import Any, Dict

    Fields = Dict[str, Any]

EVENT_MARK = "::cluster "
EXIT_NODE = 71  # the node itself is unfit: its port is taken, its network has no way to the master
EXIT_RUN_DIR = 73  # the run directory cannot be written to
EXIT_RUN_ME_AGAIN = 75

HEARTBEAT_S = 2.0
#: Time for the other ranks to end after one has failed, and after a request to stop.
FAILED_GRACE_S = 10.0
STOP_GRACE_S = 60.0
#: The node's script writes to its file every 2 s. Without a change for so long, the script is dead.
SCRIPT_TIMEOUT_S = 30.0
#: A master needs seconds to start: its silence or refusals before this time are not reported.
UNREACHABLE_AFTER_S = 4.0
REFUSED_AFTER_S = 20.0
GPU_SAMPLE_S = 10.0
#: Text without a newline reaches the log after this time, or beyond this size.
PARTIAL_LINE_S = 1.0
LINE_LIMIT = 1 << 16
#: Shorter values of secrets are not masked: they would mask every digit of a log.
SECRET_MIN_LENGTH = 4

#: What gloo, NCCL and torch's TCPStore raise when a peer is gone or does not answer: a consequence, not a cause.
SECONDARY = re.compile(
    r"Dist(Store|Network)Error: |(RuntimeError|DistBackendError): .*(Connection (was likely )?(closed|reset|refused)"
    r"|Broken pipe|Socket closed|[Tt]imed out waiting|remote process exited|ncclRemoteError"
    r"|NCCL communicator was aborted)"
)


class Settings:
    """This node's place in the job, from the environment. Raises SystemExit for a variable that is missing or wrong."""

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
        except KeyError as error:
            raise SystemExit("agent: the variable {} is not set".format(error)) from None
        except ValueError as error:
            raise SystemExit(
                "agent: a number was expected in PET_* or CLUSTER_NODES_ON_HOST: {}".format(error)
            ) from None
        self.name = environment.get("CLUSTER_NODE") or "node-%d" % self.node_rank
        self.address = environment.get("CLUSTER_NODE_ADDRESS", "")
        self.hosts = environment.get("CLUSTER_HOSTS", "").split()
        names = [name for name in environment.get("CLUSTER_SECRETS", "").split(",") if name]
        self.secrets = [environment[name] for name in names if environment.get(name)]
        self.folder = os.path.join(self.run_dir, "attempt-" + self.attempt)

    def path(self, ending: str) -> str:
        """A file of this node in the attempt's folder."""
        return f"{self.folder}/{self.name}{ending}"


class Masker:
    """Replaces the values of secrets by `***`, also in text that arrives in pieces."""

    def __init__(self, values: Iterable[str]) -> None:
        parts = {part for value in values for part in value.splitlines() if len(part) >= SECRET_MIN_LENGTH}
        self._values = sorted((part.encode() for part in parts), key=len, reverse=True)

    def __call__(self, text: bytes) -> bytes:
        """The bytes `text` without secrets."""
        for value in self._values:
            text = text.replace(value, b"***")
        return text

    def held_back(self, text: bytes) -> int:
        """How many bytes at the end of `text` may be the beginning of a secret."""
        most = max((len(value) - 1 for value in self._values), default=0)
        for size in range(min(most, len(text)), 0, -1):
            if any(value.startswith(text[-size:]) for value in self._values):
                return size
        return 0


class Log:
    """The node's log, one file per rank, and the console; a disk that is full stops none of the ranks."""

    def __init__(self, settings: Settings) -> None:
        self._mask = Masker(settings.secrets)
        self._lock = threading.Lock()
        self._console = sys.stdout.buffer
        self.error = ""
        folder = os.path.join(settings.folder, "ranks", settings.name)
        os.makedirs(folder, exist_ok=True)
        self._all = open(settings.path(".log"), "ab", buffering=0)
        self._ranks = [open(os.path.join(folder, "%d.log" % rank), "ab", buffering=0) for rank in range(settings.ranks)]

    def line(self, text: bytes, local_rank: int | None = None) -> None:
        """Write one line of a rank, or of the agent; the values of secrets are masked."""
        text = self._mask(text) + b"\n"
        shown = b"[%d] %s" % (local_rank, text) if local_rank else text
        with self._lock:
            if local_rank is not None:
                self._write(self._ranks[local_rank], text)
            self._write(self._all, shown)
            if EVENT_MARK.encode() not in text and self._console is not None:
                try:
                    self._console.write(shown)
                    self._console.flush()
                except OSError:
                    self._console = None

    def say(self, text: str) -> None:
        """Write a line of the agent's own."""
        self.line(("agent: " + text).encode())

    def event(self, event: str, **fields: object) -> None:
        """Write an event of docs/contract.md."""
        content = dict(event=event, time=round(time.time(), 3), **fields)
        self.line((EVENT_MARK + json.dumps(content, separators=(",", ":"))).encode())

    def masked(self, text: str) -> str:
        """The text without secrets."""
        return self._mask(text.encode(errors="replace")).decode(errors="replace")

    def held_back(self, text: bytes) -> int:
        """How many bytes at the end of `text` may be the beginning of a secret."""
        return self._mask.held_back(text)

    def _write(self, file: FileIO, data: bytes) -> None:
        try:
            file.write(data)
        except OSError as error:
            self.error = "{}: {}".format(file.name, error.strerror)


class Status:
    """The node's status file: written to a temporary file and renamed, so that a reader never sees half of it."""

    def __init__(self, settings: Settings) -> None:
        self._path = settings.path(".json")
        self._lock = threading.Lock()
        self._written = 0.0
        self.fields = {
            "node": settings.name,
            "node_rank": settings.node_rank,
            "phase": "starting",
            "pid": os.getpid(),
            "started_at": round(time.time(), 3),
        }

    def write(self, **fields: object) -> None:
        """Change fields and write the file."""
        with self._lock:
            self.fields.update(fields, heartbeat=round(time.time(), 3))
            self._written = time.monotonic()
            text = json.dumps(self.fields, separators=(",", ":")) + "\n"
            try:
                with open(self._path + ".tmp", "w") as file:
                    file.write(text)
                os.replace(self._path + ".tmp", self._path)
            except OSError:  # a full disk has no room for another file, but still has this one's block
                self._overwrite(text)

    def _overwrite(self, text: str) -> None:
        try:
            os.remove(self._path + ".tmp")
        except OSError:
            pass
        try:
            with open(self._path, "r+") as file:
                file.write(text)
                file.truncate()
        except OSError:
            pass

    def beat(self) -> None:
        """Write the file when the last write is HEARTBEAT_S ago."""
        if time.monotonic() - self._written >= HEARTBEAT_S:
            self.write()


class Rank:
    """One rank: its process, its output, and how it ended (`code`: negative for a signal)."""

    def __init__(
        self,
        settings: Settings,
        local_rank: int,
        command: list[str],
        environment: Mapping[str, str],
        log: Log,
        hooks: str,
    ) -> None:
        self.local_rank = local_rank
        self.number = settings.node_rank * settings.ranks + local_rank
        self.code: int | None = None
        self.ended_at = 0.0
        self.event: Fields | None = None
        self.stopped_before = False
        self.out_of_memory = False
        self._record = os.path.join(hooks, "rank-%d.json" % local_rank)
        self.process = subprocess.Popen(
            command,
            env=dict(
                environment, **rank_variables(settings, self.number, local_rank), CLUSTER_RANK_RECORD=self._record
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=_in_rank,
        )
        self.reader = threading.Thread(target=self.read, args=(log,), daemon=True)
        self.reader.start()

    def read(self, log: Log) -> None:
        """Copy the rank's output to the log, line by line, until it ends."""
        assert self.process.stdout is not None
        out = self.process.stdout.fileno()
        pending = b""
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while True:
                if not selector.select(PARTIAL_LINE_S if pending else None) or len(pending) > LINE_LIMIT:
                    keep = log.held_back(pending)
                    if len(pending) > keep:
                        self._line(pending[: len(pending) - keep], log)
                        pending = pending[len(pending) - keep :]
                    continue
                chunk = os.read(out, LINE_LIMIT)
                if not chunk:
                    break
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self._line(line, log)
        if pending:
            self._line(pending, log)

    def _line(self, line: bytes, log: Log) -> None:
        line = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]  # of a progress bar, what a terminal would show
        if EVENT_MARK.encode() in line:
            self._heard(line.decode(errors="replace").partition(EVENT_MARK)[2])
        log.line(line, self.local_rank)

    def _heard(self, text: str) -> None:
        try:
            event = json.loads(text)
        except ValueError:
            return
        if isinstance(event, dict) and event.get("event") == "failed" and event.get("error"):
            self.event = event

    def ended(self, status: int, now: float, stopping: bool) -> None:
        """Note how the process ended; `status` is what waitpid gave."""
        self.code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        self.process.returncode = self.code
        self.ended_at = now
        self.stopped_before = stopping

    def exception(self) -> Fields | None:
        """What the rank itself recorded of an exception that ended it, or None."""
        try:
            with open(self._record) as file:
                found: Fields = json.load(file)
                return found
        except (OSError, ValueError):
            return None

    def failure(self) -> Fields | None:
        """How the rank failed, or None: rank, time, error, hint, exit_code, secondary."""
        if self.code in (None, 0, EXIT_RUN_ME_AGAIN):
            return None
        found: Fields = {"rank": self.number, "local_rank": self.local_rank, "time": self.ended_at, "hint": ""}
        found.update(exit_code=self.code if self.code > 0 else 128 - self.code, secondary=False)
        raised, number = self.exception(), -self.code
        if self.event is not None:
            found.update(error=str(self.event["error"]), hint=str(self.event.get("hint") or ""))
            found["secondary"] = bool(self.event.get("echo"))
            found["time"] = min(self.ended_at, _number(self.event.get("time"), self.ended_at))
        elif raised is not None:  # also of a rank that was stopped while it ended
            found.update(error=raised["error"], time=raised["time"], secondary=_is_secondary(raised["error"]))
            found["exit_code"] = max(1, self.code)
        elif self.stopped_before and number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGUSR2):
            return None
        elif number > 0:
            name = _signal_name(number)
            found["error"] = "out of memory: the kernel killed it" if self.out_of_memory else "killed by " + name
            found["secondary"] = number == signal.SIGABRT  # how torch ends a rank that has lost its peers
        else:
            found["error"] = "exit code %d" % self.code
            found["secondary"] = self.stopped_before
        return found


def first_failure(ranks: Iterable[Rank]) -> Fields | None:
    """The failure that came first among a node's ranks: causes before consequences. None where no rank failed.

    `others` has what the other ranks failed of, in the same order.
    """
    failures = [found for found in (rank.failure() for rank in ranks) if found is not None]
    failures.sort(key=lambda found: (found["secondary"], found["time"]))
    others = [{"rank": found["rank"], "error": found["error"]} for found in failures[1:]]
    return dict(failures[0], others=others) if failures else None


def exit_code(ranks: Iterable[Rank], failure: Fields | None, checkpoint_asked: bool) -> int:
    """The node's exit code from how its ranks ended."""
    codes = [rank.code or 0 for rank in ranks]
    if not any(codes):
        return 0
    if checkpoint_asked or (failure is None and EXIT_RUN_ME_AGAIN in codes):
        return EXIT_RUN_ME_AGAIN
    if failure is not None:
        return int(failure["exit_code"])
    code = next(code for code in codes if code)
    return code if code > 0 else 128 - code


def rank_command(arguments: list[str]) -> list[str]:
    """The command of a rank, from what torchrun would be given."""
    if not arguments or arguments in (["-m"], ["--no-python"]):
        raise SystemExit("agent: no program: agent.py [-m MODULE | --no-python PROGRAM | SCRIPT] ARGUMENTS...")
    if arguments[0] == "--no-python":
        return arguments[1:]
    if arguments[0].startswith("-") and arguments[0] != "-m":
        raise SystemExit("agent: {}: expected -m MODULE, --no-python PROGRAM or a script".format(arguments[0]))
    return [sys.executable, "-u", *arguments]


def rank_variables(settings: Settings, rank: int, local_rank: int) -> dict[str, str]:
    """The variables that torchrun gives a rank."""
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
    }
    return {name: str(value) for name, value in values.items()}


def node_environment(settings: Settings, environment: Mapping[str, str], hooks: str) -> dict[str, str]:
    """What all ranks of the node have in common: threads, network device, the folder of `sitecustomize`.

    Raises NodeError when no network device has the node's address.
    """
    values = dict(environment)
    cores = len(os.sched_getaffinity(0))
    values.setdefault("OMP_NUM_THREADS", str(max(1, cores // (settings.ranks * settings.nodes_on_host))))
    values.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    values.setdefault("PYTHONFAULTHANDLER", "1")
    values["PYTHONUNBUFFERED"] = "1"
    values["PYTHONPATH"] = os.pathsep.join(part for part in (hooks, environment.get("PYTHONPATH")) if part)
    device = network_device(settings)
    if device:
        values.setdefault("GLOO_SOCKET_IFNAME", device)
        values.setdefault("NCCL_SOCKET_IFNAME", "=" + device)
    return values


class NodeError(Exception):
    """This node cannot run its ranks."""


def network_device(settings: Settings) -> str:
    """The device with the node's address, or the one that leads to a peer; "" where neither is known.

    gloo and NCCL guess one, and take `docker0` or `lo`. Raises NodeError when there is none.
    """
    address = settings.address
    if not address:
        if len(settings.hosts) < 2:
            return "lo" if settings.hosts else ""
        peer = settings.hosts[1 if settings.node_rank == 0 else 0]
        address = _address_towards(peer)
    device = _devices().get(address)
    if device is None and address.startswith("127."):
        device = "lo"
    if device is None and settings.address:  # behind a translated address: take the device that leads to the master
        device = _devices().get(_address_towards(settings.master))
    if device is None:
        raise NodeError("{}: no network device has the address {}".format(socket.gethostname(), address))
    return device


def _address_towards(peer: str) -> str:
    """This machine's own address on the way to a peer."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # of a datagram socket: chooses the route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise NodeError("{}: no way to {}: {}".format(socket.gethostname(), peer, error.strerror or error)) from None


def _devices() -> dict[str, str]:
    """The device of each of this machine's addresses (of those of version 4, each device's first one)."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:  # it has no such address
                continue
            found[socket.inet_ntoa(answer[20:24])] = name
    try:
        with open("/proc/net/if_inet6") as file:
            for line in file:
                words = line.split()
                found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))] = words[5]
    except OSError:
        pass
    return found


def watch_master(settings: Settings, log: Log, ended: threading.Event) -> None:
    """Report whether the master's port can be reached, and why not, until it accepts a connection."""
    where = "%s:%d" % (settings.master, settings.port)
    began, said = time.monotonic(), None

    def report(reachable: bool, listening: bool, why: str = "") -> None:
        nonlocal said
        if said != (reachable, listening, why):
            said = (reachable, listening, why)
            log.event(
                "joining",
                node=settings.node_rank,
                master=where,
                reachable=reachable,
                listening=listening,
                why=log.masked(why),
            )

    while not ended.is_set():
        waited_s = time.monotonic() - began
        try:
            socket.create_connection((settings.master, settings.port), timeout=5).close()
            return report(True, True)
        except ConnectionRefusedError:
            report(True, False, "Connection refused" if waited_s > REFUSED_AFTER_S else "")
        except socket.timeout:
            report(False, False, "no answer within 5 s")
        except OSError as error:
            if waited_s > UNREACHABLE_AFTER_S:
                report(False, False, error.strerror or str(error))
        ended.wait(0.5)
    return None


def check_port(settings: Settings) -> None:
    """Raise NodeError when another program listens on the master's port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", settings.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise NodeError("port %d is taken: EADDRINUSE" % settings.port) from None


def sample_gpus(status: Status, ended: threading.Event) -> None:
    """Write the use and the memory of the node's GPUs to the status file until the job ends."""
    query = [
        "nvidia-smi",
        "--query-gpu=index,utilization.gpu,memory.used,memory.total",
        "--format=csv,noheader,nounits",
    ]
    while not ended.wait(GPU_SAMPLE_S):
        try:
            out = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=GPU_SAMPLE_S).stdout
            rows = [[int(word) for word in line.split(",")] for line in out.decode().splitlines()]
        except (OSError, ValueError, subprocess.SubprocessError):
            continue
        names = ("index", "percent", "used_mib", "total_mib")
        status.write(gpus=[dict(zip(names, row)) for row in rows])


class OutOfMemory:
    """Counts the processes that the kernel has killed in this node's control group for want of memory."""

    def __init__(self) -> None:
        self._files = [path for path in self._candidates() if os.path.exists(path)]
        self._before = self.count()

    def count(self) -> int:
        """How many there have been, as far as the control group shows."""
        total = 0
        for path in self._files:
            try:
                with open(path) as file:
                    found = re.search(r"^oom_kill (\d+)", file.read(), re.MULTILINE)
                total = max(total, int(found.group(1)) if found else 0)
            except OSError:
                pass
        return total

    def happened(self) -> bool:
        """Whether there has been another one since the last call."""
        count = self.count()
        self._before, before = count, self._before
        return count > before

    @staticmethod
    def _candidates() -> Iterator[str]:
        yield "/sys/fs/cgroup/memory.events"
        yield "/sys/fs/cgroup/memory/memory.oom_control"
        try:
            with open("/proc/self/cgroup") as file:
                groups = [line.rstrip("\n").split(":", 2) for line in file]
        except OSError:
            return
        for _, controllers, path in groups:
            if not controllers:
                yield "/sys/fs/cgroup{}/memory.events".format(path.rstrip("/"))
            elif "memory" in controllers.split(","):
                yield "/sys/fs/cgroup/memory{}/memory.oom_control".format(path.rstrip("/"))


class ScriptWatch:
    """Notices the death of the node's script outside of the container, which cannot stop the container any more."""

    def __init__(self, settings: Settings) -> None:
        self._path = settings.path(".alive")
        self._watches = os.path.exists(self._path)
        self._last, self._since = "", time.monotonic()

    def is_dead(self) -> bool:
        """Whether the script was there and has not written to its file for SCRIPT_TIMEOUT_S."""
        if not self._watches:
            return False
        try:
            with open(self._path) as file:
                text = file.read()
        except OSError:
            text = self._last
        if text != self._last or not text:  # a full disk takes nothing of what the script writes
            self._last, self._since = text, time.monotonic()
        return time.monotonic() - self._since > SCRIPT_TIMEOUT_S


#: Blocked in every thread, so that the main loop takes them one by one and acts without a handler's races.
SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2}


class Agent:
    """Runs the ranks of one node from their start to their end."""

    def __init__(self, settings: Settings, log: Log, status: Status) -> None:
        self._settings, self._log, self._status = settings, log, status
        self._ranks: list[Rank] = []
        self._ended = threading.Event()
        self._checkpoint_asked = False
        self._stopping_since: float | None = None
        self._grace_s = STOP_GRACE_S
        self._stop_reason = ""

    def run(self, command: list[str], environment: Mapping[str, str], hooks: str) -> int:
        """Start the ranks, wait for all of them; returns the node's exit code."""
        settings, status = self._settings, self._status
        memory, script = OutOfMemory(), ScriptWatch(settings)
        for local_rank in range(settings.ranks):
            try:
                rank = Rank(settings, local_rank, command, environment, self._log, hooks)
            except OSError as error:
                self._stop(0, "")
                raise NodeError("{}: {}".format(command[0], error.strerror)) from None
            self._ranks.append(rank)
        threading.Thread(target=watch_master, args=(settings, self._log, self._ended), daemon=True).start()
        if environment.get("CUDA_VISIBLE_DEVICES") and shutil.which("nvidia-smi"):
            threading.Thread(target=sample_gpus, args=(status, self._ended), daemon=True).start()
        status.write(phase="running", ranks=self._rank_states())
        while any(rank.code is None for rank in self._ranks):
            got = signal.sigtimedwait(SIGNALS, HEARTBEAT_S / 2)
            if got is not None and got.si_signo in SIGNALS:  # no other after SIGCONT, whose number is not set
                self._signalled(got.si_signo, memory)
            if script.is_dead():
                self._stop(STOP_GRACE_S, "the node's script outside of the container is gone")
            self._kill_late()
            status.beat()
        return self._finish()

    def _signalled(self, number: int, memory: OutOfMemory) -> None:
        if number == signal.SIGCHLD:
            self._reap(memory)
        elif number == signal.SIGUSR2:
            self._checkpoint_asked = True
            self._send(signal.SIGUSR2)
        else:
            self._stop(STOP_GRACE_S, "{} received".format(_signal_name(number)))

    def _reap(self, memory: OutOfMemory) -> None:
        """Note the ranks that have ended. After a failure the other ranks are stopped."""
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
            rank.ended(wait_status, time.time(), self._stopping_since is not None)
            if rank.code == -signal.SIGKILL:
                rank.out_of_memory = memory.happened()
            if rank.code not in (0, EXIT_RUN_ME_AGAIN):
                self._stop(FAILED_GRACE_S, "")
            elif rank.code == EXIT_RUN_ME_AGAIN:
                self._stop(STOP_GRACE_S, "", signals=False)
        self._status.write(ranks=self._rank_states())

    def _stop(self, grace_s: float, why: str, signals: bool = True) -> None:
        """Ask the ranks to end; after `grace_s` they are killed."""
        if self._stopping_since is not None:
            return
        self._stopping_since, self._grace_s, self._stop_reason = time.monotonic(), grace_s, why
        if why:
            self._log.say(why + ": stopping the ranks")
        if signals:
            self._send(signal.SIGTERM)

    def _kill_late(self) -> None:
        if self._stopping_since is not None and time.monotonic() - self._stopping_since > self._grace_s:
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            if rank.code is None:
                os.kill(rank.process.pid, number)

    def _rank_states(self) -> list[Fields]:
        return [{"rank": rank.number, "pid": rank.process.pid, "exit_code": rank.code} for rank in self._ranks]

    def _finish(self) -> int:
        """Remove what the ranks have left, complete the log, report the end."""
        self._ended.set()
        kill_descendants()
        for rank in self._ranks:
            rank.reader.join(5)
        failure = first_failure(self._ranks)
        code = exit_code(self._ranks, failure, self._checkpoint_asked)
        if failure is not None:
            for fields in (failure, *failure["others"]):
                fields.update((key, self._log.masked(fields[key])) for key in ("error", "hint") if key in fields)
            if self._log.error:
                failure["error"] += "; the log is incomplete: " + self._log.error
            self._log.say("rank %d failed first: %s" % (failure["rank"], failure["error"]))
        elif code == EXIT_RUN_ME_AGAIN:
            events = [rank.event for rank in self._ranks if rank.event is not None]
            self._stop_reason = self._log.masked(str(events[0]["error"])) if events else self._stop_reason
        self.report_end(code, failure)
        return code

    def report_end(self, code: int, failure: Fields | None) -> None:
        """Write how the node ended to the status file."""
        fields = {"phase": "exited", "exit_code": code, "ended_at": round(time.time(), 3), "failure": failure}
        self._status.write(ranks=self._rank_states(), reason=self._stop_reason, **fields)


def kill_descendants() -> None:
    """Kill every process that the ranks have started and left: as a subreaper the agent is their parent now."""
    for _ in range(20):
        parents = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open("/proc/{}/stat".format(name), "rb") as file:
                        state, parent = file.read().rpartition(b")")[2].split()[:2]
                except (OSError, ValueError):  # it has ended meanwhile
                    continue
                if state not in (b"Z", b"X"):
                    parents[int(name)] = int(parent)
        found: set[int] = set()
        new = {os.getpid()}
        while new:
            new = {pid for pid, parent in parents.items() if parent in new} - found
            found |= new
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.05)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def record_exceptions() -> None:
    """Have this process record the exception that ends it, as the agent's `sitecustomize` in a rank.

    Only the first Python process of a rank does, not those that it starts. The image's own `sitecustomize` is imported
    as it would have been.
    """
    path = os.environ.pop("CLUSTER_RANK_RECORD", "")
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)
    if not path:
        return
    before, main = sys.excepthook, os.getpid()

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == main and issubclass(kind, Exception):
            try:
                lines = str(error).strip().splitlines() or [""]
                text = "{}: {}".format(kind.__qualname__, lines[0]) if lines[0] else kind.__qualname__
                content = {"time": time.time(), "error": text, "text": str(error)[:4000]}
                with open(path, "w") as file:
                    json.dump(content, file)
            except Exception:
                pass
        before(kind, error, trace)

    sys.excepthook = record


def _in_rank() -> None:
    """Between fork and exec: a rank takes signals, and dies with the agent."""
    if _LIBC is not None:
        _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _load_libc() -> Any:
    try:
        import ctypes

        return ctypes.CDLL(None)
    except (ImportError, OSError):
        return None


_LIBC = None


def _is_secondary(error: str) -> bool:
    return bool(SECONDARY.match(error))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number


def _number(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float)) else otherwise


def main(arguments: list[str]) -> int:
    """Run the node; returns its exit code."""
    global _LIBC
    settings = Settings(os.environ)
    command = rank_command(arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _LIBC = _load_libc()
    if _LIBC is not None:
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
        agent = Agent(settings, log, status)
        try:
            if settings.node_rank == 0:
                check_port(settings)
            return agent.run(command, node_environment(settings, os.environ, hooks), hooks)
        except NodeError as error:
            log.say("error: {}".format(error))
            failure = {"rank": None, "time": round(time.time(), 3), "error": str(error), "secondary": False}
            agent.report_end(EXIT_NODE, dict(failure, exit_code=EXIT_NODE))
            return EXIT_NODE
    finally:
        shutil.rmtree(hooks, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
elif __name__ == "sitecustomize":
    record_exceptions()
