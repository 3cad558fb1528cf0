"""The agent: starts the setup and the ranks of a node, supervises them, and reports how they ended."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import pkgutil
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from typing import Mapping

from .fence import Fence
from .output import Log, Status
from .ranks import LIBC, Rank, exit_code, first_failure, signal_name
from .settings import (
    COLLECTED_ENDING,
    EVENT_MARK,
    EXIT_NODE,
    EXIT_RUN_DIR,
    EXIT_RUN_ME_AGAIN,
    HEARTBEAT_S,
    SIGNALS,
    Fields,
    Settings,
    node_environment,
    rank_command,
    rank_variables,
)
from .setup import Setup
from .stall import StallDetector
from .usage import Usage, count_memory_kills

#: Time for the other ranks to exit after a failure. After a request to stop it is `Settings.grace_s`.
FAILED_GRACE_S = 10.0
#: The node's script updates its file every 2 s. Without a change for this time, the script is dead.
SCRIPT_TIMEOUT_S = 30.0
#: A master needs seconds to start: earlier failures to connect are not reported.
UNREACHABLE_AFTER_S = 4.0
REFUSED_AFTER_S = 20.0


class Agent:
    """Starts and supervises the ranks of one node."""

    def __init__(self, settings: Settings, log: Log, status: Status) -> None:
        self._settings = settings
        self._log = log
        self._status = status
        self._ranks: list[Rank] = []
        self._ended = threading.Event()
        self._checkpoint_requested = False
        self._checkpoint_requested_at = -math.inf
        self._stopping_since: float | None = None
        self._terminated = False
        self._fence = Fence(settings)
        self._fenced = False
        self._grace_s = settings.grace_s()
        self._stop_reason = ""
        self._memory_kills = count_memory_kills()
        self._script = ""
        self._script_changed = time.monotonic()

    def run(self, command: list[str], environment: dict[str, str], hooks: str) -> int:
        """Run the node, hold its container if the launcher asks for that, and return the node's exit code."""
        code = self._run(command, environment, hooks)
        if not self._terminated and not self._fenced:
            hold(self._settings)
        return code

    def _run(self, command: list[str], environment: dict[str, str], hooks: str) -> int:
        """Run the setup, start the ranks, and wait for their end; return the node's exit code."""
        error = ""
        if environment.get("CLUSTER_SETUP"):
            setup = Setup(self._settings, self._log, self._status, environment)
            self._status.write(phase="setup")
            try:
                error = setup.run()
            except OSError as failed:
                error = "setup: {}: {}".format(failed.filename, failed.strerror)
            self._terminated = setup.terminated
            if command[0] == sys.executable:
                command = [setup.python, *command[1:]]
        error = error or self._wait_for_master() or self._start(command, environment, hooks)
        if error:
            self._log.message("error: " + error)
            failure = {"rank": None, "time": round(time.time(), 3), "error": error, "secondary": False}
            self._report_end(EXIT_NODE, dict(failure, exit_code=EXIT_NODE))
            return EXIT_NODE
        watching = (self._settings, self._log, self._status, self._ended)
        threading.Thread(target=watch_master, args=watching, daemon=True).start()
        self._status.write(phase="running")
        usage = Usage(self._ranks, self._ended)
        stall = StallDetector(self._settings, self._log, self._status, self._ranks)
        while any(rank.code is None for rank in self._ranks):
            received = signal.sigtimedwait(SIGNALS, stall.wait_s)
            if received is not None and received.si_signo in SIGNALS:  # after SIGCONT the number is not set
                self._handle_signal(received.si_signo)
            if self._script_is_dead():
                self._stop(self._settings.grace_s(), "the node's script outside of the container has died")
            if self._stopping_since is not None and time.monotonic() - self._stopping_since > self._grace_s:
                self._send(signal.SIGKILL)
            stall.sample()
            if time.monotonic() - self._status.written_at >= HEARTBEAT_S:
                seen = {"usage": usage.sample(), "leaving": self._leaving(), "output_at": self._log.output_at}
                self._status.write(**seen, **self._log.lost())
                self._end_overdue()
                stall.check(usage)
                self._obey_fence()
        return self._finish()

    def _start(self, command: list[str], environment: Mapping[str, str], hooks: str) -> str:
        """Start the ranks; return why this node cannot run them, or ""."""
        settings = self._settings
        if settings.node_rank == 0 and is_taken(settings.port):
            return "port %d is already in use: EADDRINUSE" % settings.port
        for local_rank in range(settings.ranks):
            number = settings.first_rank + local_rank
            variables = dict(environment, **rank_variables(settings, local_rank, hooks))
            try:
                self._ranks.append(Rank(number, local_rank, command, variables, self._log, self._status))
            except OSError as error:
                return "{}: {}".format(command[0], error.strerror)
        return ""

    def _script_is_dead(self) -> bool:
        """Return whether the node's script outside of the container is dead: nothing else would stop the container."""
        text = ""
        with contextlib.suppress(OSError), open(self._settings.path(".alive")) as file:
            text = file.read()
        if text != self._script or not text:  # no file without a container; an empty file on a full disk
            self._script = text
            self._script_changed = time.monotonic()
        return time.monotonic() - self._script_changed > SCRIPT_TIMEOUT_S

    def _handle_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif number == signal.SIGUSR2:
            self._checkpoint_requested = True
            self._checkpoint_requested_at = time.monotonic()
            self._send(signal.SIGUSR2)
        else:
            self._terminated = self._terminated or number == signal.SIGTERM
            grace_s = 0.0 if self._leaving() else self._settings.grace_s()
            self._stop(grace_s, signal_name(number) + " received")

    def _leaving(self) -> list[int]:
        """Return the ranks that have not exited although the programs of all ranks of this node have ended well."""
        if not all(rank.has_ended for rank in self._ranks):
            return []
        return [rank.number for rank in self._ranks if rank.code is None]

    def _end_overdue(self) -> None:
        """Kill the ranks whose program has failed, and that have not exited within the grace.

        Whether a rank whose program ended well is overdue depends on the other nodes: the launcher decides that.
        """
        for rank in self._ranks:
            if rank.code is not None or not rank.program_code():
                continue
            since = rank.failed_since = rank.failed_since or time.monotonic()
            if time.monotonic() - since > self._settings.grace_s() and not rank.is_overdue:
                self._log.message("rank %d has failed, but does not exit: killing it" % rank.number)
                rank.is_overdue = True
                os.kill(rank.process.pid, signal.SIGKILL)

    def _obey_fence(self) -> None:
        """Kill the ranks if a newer attempt of the job runs, unless they have been asked to end with a checkpoint."""
        saving = time.monotonic() - self._checkpoint_requested_at <= self._settings.grace_s()
        if self._stopping_since is not None or saving:
            return
        newer = self._fence.newer_attempt()
        if newer:
            self._fenced = True
            self._stop(0.0, "attempt %d of this job has started" % newer, signals=False)
            self._send(signal.SIGKILL)

    def _wait_for_master(self) -> str:
        """Wait until the name of the master resolves, if the launcher asks for that; return why it does not, or "".

        The DNS of Kubernetes learns the name of a pod some time after the pods have started.
        """
        if not self._settings.rendezvous_timeout_s:
            return ""
        search = MasterSearch(self._settings, self._log, self._status)
        until = time.monotonic() + self._settings.rendezvous_timeout_s
        while not search.found.is_set():
            received = signal.sigtimedwait(SIGNALS - {signal.SIGCHLD}, 0.05)
            if received is not None and received.si_signo in SIGNALS:
                self._terminated = received.si_signo == signal.SIGTERM
                return "stopped while it waited for the name of the master"
            if time.monotonic() > until:
                timeout = "%g s" % self._settings.rendezvous_timeout_s
                return "the name {} does not resolve after {}: {}".format(
                    self._settings.master, timeout, search.why
                )
            if time.monotonic() - self._status.written_at >= HEARTBEAT_S:
                self._status.write()
        return ""

    def _reap(self) -> None:
        """Store the exit codes of ranks that have ended; after a failure stop the other ranks."""
        by_pid = {rank.process.pid: rank for rank in self._ranks if rank.code is None}
        ended = []
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in by_pid:
                    ended.append((by_pid[pid], wait_status))
        for rank, wait_status in ended:
            killed = os.WIFSIGNALED(wait_status)
            code = -os.WTERMSIG(wait_status) if killed else os.WEXITSTATUS(wait_status)
            if killed and (rank.is_overdue or self._stopping_since is not None):
                code = 0 if rank.has_ended else rank.program_code() or code
            rank.code = rank.process.returncode = code
            rank.ended_at = time.time()
            rank.stopped_before = self._stopping_since is not None
            if rank.code == -signal.SIGKILL:
                kills = count_memory_kills()
                before = self._memory_kills
                rank.out_of_memory = kills > before
                self._memory_kills = kills
        codes = {rank.code for rank, _ in ended}
        if codes - {0, EXIT_RUN_ME_AGAIN}:
            self._stop(FAILED_GRACE_S, "")
        elif EXIT_RUN_ME_AGAIN in codes:
            self._stop(self._settings.grace_s(), "", signals=False)

    def _stop(self, grace_s: float, why: str, signals: bool = True) -> None:
        """Send SIGTERM to the ranks; after `grace_s` they are killed."""
        if self._stopping_since is not None:
            return
        self._stopping_since = time.monotonic()
        self._grace_s = grace_s
        self._stop_reason = why
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
                fields.update(
                    (key, self._log.masked(fields[key])) for key in ("error", "hint") if key in fields
                )
            if self._log.error:
                failure["error"] += "; the log is incomplete: " + self._log.error
            self._log.message("rank %d failed first: %s" % (failure["rank"], failure["error"]))
        elif code == EXIT_RUN_ME_AGAIN:
            errors = [rank.event.error for rank in self._ranks if rank.event is not None and rank.event.error]
            self._stop_reason = self._log.masked(errors[0]) if errors else self._stop_reason
        self._report_end(code, failure)
        return code

    def _report_end(self, code: int, failure: Fields | None) -> None:
        """Write how the node ended to the status file."""
        fields = {"phase": "exited", "exit_code": code, "ended_at": round(time.time(), 3), "failure": failure}
        self._status.write(reason=self._stop_reason, **fields, **self._log.lost())


class MasterSearch:
    """Resolves the master's name in a thread, because an answer of the DNS may take longer than a heartbeat.

    `found` is set once the name resolves. Until then `why` is the last error.
    """

    def __init__(self, settings: Settings, log: Log, status: Status) -> None:
        self.found = threading.Event()
        self.why = "no answer from the DNS"
        self._settings = settings
        self._log = log
        self._status = status
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        reported = ""
        while True:
            try:
                socket.getaddrinfo(self._settings.master, self._settings.port)
            except OSError as error:
                self.why = error.strerror or str(error)
            else:
                self.found.set()
                return
            if self.why != reported:
                reported = self.why
                report_joining(
                    self._settings, self._log, self._status, reachable=False, listening=False, why=self.why
                )
            time.sleep(0.5)


def report_joining(
    settings: Settings, log: Log, status: Status, *, reachable: bool, listening: bool, why: str
) -> None:
    """Write the event `joining`: whether the master's port can be reached, and why not."""
    where = "%s:%d" % (settings.master, settings.port)
    event = {"event": "joining", "time": round(time.time(), 3), "node": settings.node_rank, "master": where}
    event.update(reachable=reachable, listening=listening, why=log.masked(why))
    status.record(event)
    log.line((EVENT_MARK + json.dumps(event, separators=(",", ":"))).encode())


def remove_earlier_files(settings: Settings) -> None:
    """Remove the node's files of an earlier job of this name, which a volume has kept.

    The launcher would take its log for this job's.
    """
    for ending in (".json", ".agent", ".log", COLLECTED_ENDING):
        with contextlib.suppress(FileNotFoundError):
            os.remove(settings.path(ending))
    shutil.rmtree(os.path.join(settings.folder, "ranks", settings.name), ignore_errors=True)


def hold(settings: Settings) -> None:
    """Keep the container for `settings.hold_s`, until its files are collected, or until SIGTERM.

    Where the files of a container disappear with it, the launcher copies them in this time.
    """
    until = time.monotonic() + settings.hold_s
    while time.monotonic() < until and not os.path.exists(settings.path(COLLECTED_ENDING)):
        received = signal.sigtimedwait(SIGNALS, 0.5)
        if received is not None and received.si_signo == signal.SIGTERM:
            return


def watch_master(settings: Settings, log: Log, status: Status, ended: threading.Event) -> None:
    """Report whether the master's port is reachable, and why not, until it accepts a connection."""
    started = time.monotonic()
    last = None
    while not ended.is_set():
        waited_s = time.monotonic() - started
        reachable = True
        listening = False
        why = ""
        try:
            socket.create_connection((settings.master, settings.port), timeout=5).close()
            listening = True
        except ConnectionRefusedError:
            why = "Connection refused" if waited_s > REFUSED_AFTER_S else ""
        except socket.timeout:
            reachable = False
            why = "no answer within 5 s"
        except OSError as error:
            reachable = False
            why = error.strerror or str(error)
        if last != (reachable, listening, why) and (reachable or waited_s > UNREACHABLE_AFTER_S):
            last = (reachable, listening, why)
            report_joining(settings, log, status, reachable=reachable, listening=listening, why=why)
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


def kill_descendants() -> None:
    """Kill the processes that the ranks have left. The agent is a subreaper: it inherits the children of each."""
    for _ in range(20):
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        children = [
            int(name) for name in os.listdir("/proc") if name.isdigit() and _parent(name) == os.getpid()
        ]
        if not children:
            return
        for pid in children:
            with contextlib.suppress(OSError):  # it runs as another user
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _parent(pid: str) -> int:
    with contextlib.suppress(OSError), open("/proc/{}/stat".format(pid), "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])
    return 0  # the process has exited


def main(arguments: list[str]) -> int:
    """Run the agent; return the node's exit code."""
    settings = Settings(os.environ)
    command = rank_command(arguments)
    if settings.umask is not None:
        os.umask(settings.umask)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    LIBC.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    try:
        os.makedirs(settings.folder, exist_ok=True)
        if settings.hold_s:  # a pod: on other machines the launcher makes a new folder for each attempt
            remove_earlier_files(settings)
        status = Status(settings)
        log = Log(settings)
        # stop.sh removes the folder of an agent that it kills, by this name.
        launch = os.environ.get("CLUSTER_LAUNCH_ID", "none")
        hooks = tempfile.mkdtemp(prefix="clusterctl-{}-{}-".format(launch, settings.attempt))
        with open(os.path.join(hooks, "sitecustomize.py"), "wb") as file:
            file.write(pkgutil.get_data(__package__, "sitecustomize.py") or b"")  # also from an archive
    except OSError as error:
        print("agent: {}: {}".format(error.filename, error.strerror), file=sys.stderr)
        return EXIT_RUN_DIR
    status.write()
    try:
        return Agent(settings, log, status).run(command, node_environment(settings, os.environ, hooks), hooks)
    finally:
        shutil.rmtree(hooks, ignore_errors=True)
