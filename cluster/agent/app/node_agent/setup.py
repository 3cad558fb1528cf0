"""The setup commands of a job (`--setup`), in the container, in a virtual environment that later jobs use again.

An environment belongs to one interpreter with its packages, in one container image, on one kind of machine. Only the
agent knows them all, so it chooses the environment's folder below CLUSTER_SETUP_DIR, which stands for the commands and
the files that they name. A node that makes an environment locks it exclusively. Every node that uses it shares the lock
until it ends, so that no other job replaces packages that are in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import site
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
        self._settings = settings
        self._log = log
        self._status = status
        self._text = environment["CLUSTER_SETUP"]
        self._environment = environment
        self._facts = interpreter_facts(environment.get("CLUSTER_IMAGE", ""))
        key = hashlib.sha256("\0".join(self._facts).encode(errors="replace")).hexdigest()[:16]
        self._folder = os.path.join(environment["CLUSTER_SETUP_DIR"], key)
        self._made = os.path.join(self._folder, "setup.done")
        self.terminated = False  # whether a SIGTERM ended the setup
        self._lock = -1  # a file descriptor that stays open, so that the lock is held until this process ends
        environment["VIRTUAL_ENV"] = self._folder
        environment["PATH"] = (
            os.path.join(self._folder, "bin") + os.pathsep + environment.get("PATH", os.defpath)
        )
        self.python = os.path.join(self._folder, "bin", "python")

    def run(self) -> str:
        """Run the commands unless an earlier job has; return why they failed, or "". Raises OSError."""
        event = {"event": "setup", "time": round(time.time(), 3), "node": self._settings.node_rank}
        self._log.line((EVENT_MARK + json.dumps(event, separators=(",", ":"))).encode())
        self._status.record(event)
        os.makedirs(self._folder, exist_ok=True)
        link = self._settings.path(".venv")  # by which `exec` finds it
        with contextlib.suppress(FileNotFoundError):
            os.remove(link)
        os.symlink(self._folder, link)
        path = os.path.join(self._folder, "setup.lock")
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # NFS needs a file that is open for both
        waits = False
        while not self._is_usable():
            if self._try_lock(fcntl.LOCK_EX):
                error = "" if os.path.exists(self._made) else self._make()
                if error:
                    return error
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                return ""
            if not waits:
                self._log.message("waiting for the node or job that uses " + self._folder)
                waits = True
            if self._stopped(1.0):
                return "stopped while it waited for another node's setup"
        return ""

    def _is_usable(self) -> bool:
        """Return whether the environment is complete; then this process shares its lock."""
        if not os.path.exists(self._made) or not self._try_lock(fcntl.LOCK_SH):
            return False
        if os.path.exists(self._made):
            return True
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        return False

    def _try_lock(self, kind: int) -> bool:
        try:
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError as error:  # a file system without locks
            raise OSError(error.errno, error.strerror, self._folder) from error

    def _make(self) -> str:
        """Make the environment and run the commands; return why they failed, or ""."""
        self._make_environment()
        error = self._run_commands()
        if not error:
            with open(self._made, "w") as file:
                file.write("\n".join(self._facts) + "\n")
        return error

    def _make_environment(self) -> None:
        """Make a virtual environment that also finds the packages of this interpreter."""
        import venv
        from importlib.util import find_spec

        for entry in set(os.listdir(self._folder)) - {"setup.lock"}:  # the folder itself may be a mount
            path = os.path.join(self._folder, entry)
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)
        has_pip = find_spec("pip") is not None
        venv.create(self._folder, symlinks=True, with_pip=not has_pip)
        library = "lib/python%d.%d/site-packages" % sys.version_info[:2]
        with open(os.path.join(self._folder, library, "image.pth"), "w") as file:
            for folder in site.getsitepackages():  # with their .pth files, which an editable installation has
                file.write("import site; site.addsitedir(%r)\n" % folder)
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
                self._log.line(text, prefix=b"setup: ")

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
        self.terminated = received is not None and received.si_signo == signal.SIGTERM
        return received is not None and received.si_signo in SIGNALS


def interpreter_facts(image: str) -> list[str]:
    """Return what an environment depends on: the container image, the machine, this interpreter and its packages."""
    folders = site.getsitepackages()
    packages = [name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)]
    packages = sorted(name for name in packages if name.endswith((".dist-info", ".egg-info", ".pth")))
    system = [os.uname().machine, "-".join(platform.libc_ver()), sys.version.replace("\n", " "), sys.prefix]
    return [image, *system, *folders, *packages]
