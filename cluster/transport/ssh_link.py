"""A connection by the ssh program: one master connection (ControlMaster), and an ssh for each command.

If the user has a ControlMaster open, commands use it, and it stays open.
"""

import atexit
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE

from cluster.agent import scripts
from cluster.errors import UnreachableError
from cluster.transport import failures
from cluster.transport.interruption import refuse_interrupted
from cluster.transport.links import BrokenError, NotStartedError
from cluster.transport.local import environment
from cluster.transport.login import Login, answers
from cluster.transport.openssh import MARK, Ssh
from cluster.transport.settings import destination

#: Limit of a login, in which a person may have to touch a security key.
_LOGIN_S = 30.0
#: Seconds of login retries: sshd refuses concurrent logins above its MaxStartups.
_BUSY_S = 20.0
#: How long to wait for the processes of a closed connection.
_END_S = 5.0
_POLL_S = 0.02
_PIPE_BYTES = 1 << 16
#: A unix socket's path has at most 107 characters, and ssh appends 17 while it creates one.
_FOLDER_LENGTH = 107 - 17 - len("/socket")
#: What ssh prints for a command without a master connection; otherwise it would log in by itself.
_NO_MASTER = b"clusterctl: no master connection"
_ONLY_MASTER = ("-o", "ProxyUseFdpass=no", "-o", f"ProxyCommand=sh -c 'echo {_NO_MASTER.decode()} >&2'")
#: What it prints if sshd allows no more sessions in the connection (MaxSessions).
_FULL = b"Session open refused by peer"


class _Master:
    """A master connection. It ends with this process, even if that is killed."""

    def __init__(self, login: Login) -> None:
        """Start to log in. Raises OSError."""
        self._folder = Path(tempfile.mkdtemp(prefix="clusterctl-ssh-"))
        if len(str(self._folder)) > _FOLDER_LENGTH:
            self._folder.rmdir()
            self._folder = Path(tempfile.mkdtemp(prefix="clusterctl-ssh-", dir="/tmp"))
        self.socket = self._folder / "socket"
        log = self._folder / "log"
        # A pipe that is read during the login only, because ssh also logs each command.
        os.mkfifo(log)
        self._pipe = open(log, "rb", buffering=0, opener=_without_waiting)  # noqa: SIM115 (close() closes it)
        self._log = b""
        first = ["-M", "-N", "-o", "ControlPersist=no", "-o", "LogLevel=DEBUG1", "-E", str(log)]
        ssh = Ssh(login.node, login.settings, str(self.socket))
        words = [*ssh.words(*first), "--", destination(login.node.login)]
        argv = scripts.bash("transport/master.sh", str(self._folder), *words)
        try:
            self._process = subprocess.Popen(
                argv, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
            )
        except OSError:
            self._remove()
            raise
        _masters.add(self)

    @property
    def is_open(self) -> bool:
        """Whether ssh accepts commands; it removes its socket when the connection breaks."""
        return self.socket.is_socket()

    def wait(self, until: float) -> bool:
        """Wait until the login has succeeded; return whether it has. Raise TimeoutError."""
        while not self.is_open:
            refuse_interrupted()
            self._read_log()
            if self._has_ended():
                return False
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(_POLL_S)
        self._pipe.close()
        return True

    def _has_ended(self) -> bool:
        try:
            os.kill(int(_read(self._folder / "pid")), 0)
        except ValueError:  # it has not started
            return self._process.poll() is not None
        except ProcessLookupError:
            return True
        return False

    def said(self) -> tuple[str, str]:
        """Return the log of a login that failed, and the rest of ssh's stderr."""
        self._read_log()
        return self._log.decode(errors="replace").replace("\r\n", "\n"), _read(self._folder / "stderr")

    def _read_log(self) -> None:
        while more := self._pipe.read(_PIPE_BYTES):  # None: nothing to read now
            self._log += more

    def close(self) -> None:
        """End ssh, and remove its folder."""
        _masters.discard(self)
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._remove()

    def _remove(self) -> None:
        self._pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


#: All open master connections. The end of this process closes them, and waits for their processes.
_masters: set[_Master] = set()


@atexit.register
def _close_masters() -> None:
    for master in list(_masters):
        master.close()


class SshLink:
    """Runs commands over a master connection: its own, or one that the user has opened."""

    def __init__(self, login: Login, timeout_s: float) -> None:
        """Log in. Raises UnreachableError, which names the reason that ssh gives."""
        self._login = login
        self._master = None if login.has_master else _log_in(login, timeout_s)
        self._ssh = Ssh(login.node, login.settings, self.socket)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether the master connection's ssh runs. That of a user is asked when a command starts."""
        return not self._is_closed and (self._master is None or self._master.is_open)

    @property
    def socket(self) -> str:
        """The socket of the master connection; "" for a user's one, which the configuration names."""
        return "" if self._master is None else str(self._master.socket)

    def execute(self, line: str, data: bytes, until: float) -> tuple[int, bytes, bytes]:
        """See Link.execute. Exit code 255 is the command's: if ssh itself fails, this raises an error."""
        while True:
            code, out, errors = self._run(line, data, until)
            has_started = MARK in out or _NO_MASTER not in errors
            may_be_of_ssh = code in (255, -signal.SIGTERM)
            if has_started and (not may_be_of_ssh or self._answers()):
                return code, out, errors
            if has_started or self._is_closed:
                raise BrokenError("Connection closed")
            if _FULL not in errors:
                raise NotStartedError("Connection closed")
            # Wait until another command ends.
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(random.uniform(0.05, 0.3))

    def ping(self) -> bool:
        """See Link.ping. sshd starts `true`, the least that it can be asked for through ssh."""
        try:
            code, _, errors = self._run("exec true", b"", time.monotonic() + 60)
        except (TimeoutError, NotStartedError):
            return False
        return code == 0 or _FULL in errors

    def close(self) -> None:
        """End the running commands, and the own master connection."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                process.terminate()
        if self._master is not None:
            self._master.close()

    def _answers(self) -> bool:
        """Return whether the master connection exists, so that an exit code 255 is the command's and not ssh's."""
        return not self._is_closed and answers(self._ssh)

    def _run(self, line: str, data: bytes, until: float) -> tuple[int, bytes, bytes]:
        argv = [*self._ssh.words(*_ONLY_MASTER), "--", destination(self._login.node.login), line]
        with self._lock:
            if self._is_closed:
                raise NotStartedError("Connection closed")
            process = subprocess.Popen(
                argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=_environment(), start_new_session=True
            )
            self._running.add(process)
        with process:
            try:
                out, errors = process.communicate(data, max(0.05, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise TimeoutError from None
            finally:
                with self._lock:
                    self._running.discard(process)
                process.kill()
        return process.returncode, out, errors


def _log_in(login: Login, timeout_s: float) -> _Master:
    limit_s = min(timeout_s, _LOGIN_S)
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            master = _Master(login)
        except OSError as error:
            raise UnreachableError(f"this machine: {error.filename}: {error.strerror}") from error
        try:
            if master.wait(time.monotonic() + limit_s):
                return master
            log, printed = master.said()
        except TimeoutError:
            master.close()
            raise failures.unreachable(login, f"the login takes longer than {limit_s:g} s") from None
        except BaseException:
            master.close()
            raise
        master.close()
        if not failures.is_busy(log, printed) or time.monotonic() > until:
            raise failures.explain(login, log, printed)
        # Spread the retries of many threads.
        time.sleep(random.uniform(0.1, 1))


def _environment() -> dict[str, str]:
    # As over fabric, remote programs use the locale that they have there.
    variables = environment()
    return {name: value for name, value in variables.items() if not _is_of_locale(name)}


def _is_of_locale(name: str) -> bool:
    return name == "LANG" or name.startswith("LC_")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode(errors="replace")
    except OSError:
        return ""
