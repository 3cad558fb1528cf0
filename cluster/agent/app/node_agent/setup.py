"""The setup commands of a job (`--setup`), in the container, in a virtual environment that later jobs use again."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from subprocess import DEVNULL, PIPE, STDOUT

from .output import Log, Status
from .ranks import in_rank
from .settings import EVENT_MARK, HEARTBEAT_S, SIGNALS, Settings


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
        event = {"event": "setup", "time": round(time.time(), 3), "node": self._settings.node_rank}
        self._log.line((EVENT_MARK + json.dumps(event, separators=(",", ":"))).encode())
        self._status.record(event)
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
            preexec_fn=in_rank,
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
