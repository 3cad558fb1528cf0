"""Commands on a machine behind SSH: the only module that knows fabric and paramiko.

`ssh -G` evaluates `~/.ssh/config`, and fabric opens the connection. Commands go through its channels as bytes, because
fabric's own `run` decodes output and pastes variables into shell code. A connection is opened at the first command,
kept, and opened again when it broke.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
import random
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import paramiko
from fabric import Config, Connection

from cluster.errors import UnreachableError
from cluster.shells.openssh import destination_of, port_of
from cluster.shells.result import BEGIN, MORE_PATH, Completed

CONNECT_TIMEOUT_S = 8.0
#: An sshd, or a jump host, that many log into at once turns some away (MaxStartups): they knock again for so long.
_BUSY_S = 20.0
#: paramiko sends something this often, so that a connection whose other end has gone is noticed.
_KEEPALIVE_S = 5
_CHUNK = 1 << 16
#: What paramiko and fabric use of `ssh -G`; fabric's own timeouts are set for each connection.
_SETTINGS = (
    *("hostname", "user", "port", "forwardagent", "proxyjump", "proxycommand"),
    *("userknownhostsfile", "globalknownhostsfile", "hostkeyalias"),
)
#: What a command prints begins after it: before, `~/.bashrc` may have greeted, which bash reads also under sshd, or
#: complained (a `pyenv init` in it does, of sessions that begin at the same moment).
_MARK = f"{BEGIN}\n".encode()
# What goes wrong becomes an error here; without a handler paramiko's tracebacks would stand on the screen beside it.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class UnknownHostKey(paramiko.SSHException):
    """The machine's key is in no known_hosts file."""

    def __init__(self, host: str, key: paramiko.PKey) -> None:
        digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
        super().__init__(f"its host key {key.get_name()} SHA256:{digest} is in no known_hosts file")
        self.host = host


class _Refuse(paramiko.MissingHostKeyPolicy):
    """Never trusts a key on first sight: whoever is in between would be trusted just as well."""

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise UnknownHostKey(hostname, key)


class SshStream:
    """A running command on the other machine."""

    def __init__(self, channel: paramiko.Channel, place: str) -> None:
        self._channel = channel
        self._place = place
        self.stdin = cast(BinaryIO, _Input(channel))
        self.stdout = cast(BinaryIO, _Output(channel))
        self._errors = bytearray()
        # stderr shares its flow control with stdout: unread, it would stop both.
        self._drain = threading.Thread(target=self._read_errors, daemon=True)
        self._drain.start()

    def _read_errors(self) -> None:
        while chunk := self._channel.recv_stderr(_CHUNK):
            self._errors += chunk

    def wait(self, timeout_s: float) -> Completed:
        """Raises UnreachableError when the command does not end in time or the connection breaks."""
        if not self._channel.status_event.wait(timeout_s):
            raise UnreachableError(f"{self._place}: a command did not end within {timeout_s:g} s")
        self._drain.join(5)
        code = self._channel.recv_exit_status()
        if code == -1:
            raise UnreachableError(f"{self._place}: the connection broke")
        return Completed(code, "", _own(self._errors)[1].decode(errors="replace"))


class _Input:
    """A channel as a file to write to: closing it tells the command that its input ends."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def write(self, data: bytes) -> int:
        """Send everything, waiting while the other side does not read."""
        self._channel.sendall(data)
        return len(data)

    def flush(self) -> None:
        """Everything is sent as it is written."""

    def close(self) -> None:
        """End of input."""
        self._channel.shutdown_write()


class _Output:
    """A channel as a file to read: what the command prints, without what the login shell printed before."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._file = channel.makefile("rb", _CHUNK)
        self._began = False

    def read(self, size: int = -1) -> bytes:
        """So many bytes, fewer only at the end; all of them by default."""
        self._begin()
        return bytes(self._file.read(size))

    def readline(self) -> bytes:
        """The next line with its end; empty at the end."""
        self._begin()
        return bytes(self._file.readline())

    def _begin(self) -> None:
        while not self._began:
            line = self._file.readline()
            self._began = not line or line.endswith(_MARK)


class SshShell:
    """Runs commands on `login` (`[user@]host[:port]`, or a name from `~/.ssh/config`) over one kept connection."""

    def __init__(self, login: str, *, place: str = "", config_file: str = "") -> None:
        self.place = place or login
        self._login = login
        self._config_file = config_file
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def run(self, argv: Sequence[str], *, stdin: str | bytes = "", timeout_s: float = 60.0) -> Completed:
        """Raises UnreachableError when the machine cannot be reached or does not end the command in `timeout_s`."""
        until = time.monotonic() + timeout_s
        channel = self._start(argv, timeout_s)
        # Closed whatever happens: sshd ends a command whose channel is closed with a broken pipe or a hang-up.
        try:
            out, errors = bytearray(), bytearray()
            data = stdin.encode() if isinstance(stdin, str) else stdin
            channel.settimeout(timeout_s)
            channel.sendall(data)
            channel.shutdown_write()
            for read, into in ((channel.recv, out), (channel.recv_stderr, errors)):
                channel.settimeout(max(0.05, until - time.monotonic()))
                while chunk := read(_CHUNK):
                    into += chunk
                    channel.settimeout(max(0.05, until - time.monotonic()))
            if not channel.status_event.wait(max(0.05, until - time.monotonic())):
                raise TimeoutError
            code = channel.recv_exit_status()
        except TimeoutError as error:
            shown = " ".join(argv[:3]).splitlines()[0][:60]
            raise UnreachableError(f"{self.place}: `{shown}` did not answer within {timeout_s:g} s") from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            self.close()
            raise UnreachableError(f"{self.place}: the connection broke: {error}") from error
        finally:
            channel.close()
        if code == -1:
            self.close()
            raise UnreachableError(f"{self.place}: the connection broke")
        began, out = _own(out)
        done = Completed(code, out.decode(errors="replace"), _own(errors)[1].decode(errors="replace"))
        if not began:
            config = f"-F {self._config_file} " if self._config_file else ""
            raise UnreachableError(
                f"{self.place}: commands do not run there: {done.last_line}",
                f'try by hand: ssh {config}{self._login} "bash --version"',
            )
        return done

    @contextmanager
    def stream(self, argv: Sequence[str]) -> Iterator[SshStream]:
        """Raises UnreachableError when the machine cannot be reached, or when the connection breaks inside."""
        channel = self._start(argv, CONNECT_TIMEOUT_S)
        try:
            yield SshStream(channel, self.place)
        except (OSError, EOFError, paramiko.SSHException) as error:
            self.close()
            raise UnreachableError(f"{self.place}: the connection broke: {error}") from error
        finally:
            channel.close()

    def ping(self) -> bool:
        """Ask the other side's sshd itself, which answers also where starting a command takes long."""
        with self._lock:
            connection = self._connection
        if connection is None or not connection.is_connected:
            return False
        try:
            connection.transport.global_request("keepalive@openssh.com", wait=True)
        except (OSError, EOFError, paramiko.SSHException):
            return False
        return bool(connection.transport.is_active())

    def close(self) -> None:
        """Close the connection; the next command opens another."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _start(self, argv: Sequence[str], timeout_s: float) -> paramiko.Channel:
        # A kept connection may have died unnoticed: then a new one is tried once.
        for attempt in (1, 2):
            transport, fresh = self._transport(min(timeout_s, CONNECT_TIMEOUT_S))
            try:
                channel = transport.open_session(timeout=min(timeout_s, CONNECT_TIMEOUT_S))
                channel.exec_command(_line(argv))
            except (OSError, EOFError, paramiko.SSHException) as error:
                self.close()
                if fresh or attempt == 2:
                    raise UnreachableError(f"{self.place}: the connection broke: {error}") from error
                continue
            return channel
        raise AssertionError("unreachable")

    def _transport(self, timeout_s: float) -> tuple[paramiko.Transport, bool]:
        with self._lock:
            if self._connection is not None and self._connection.is_connected:
                return self._connection.transport, False
            self._connection = self._open(timeout_s)
            return self._connection.transport, True

    def _open(self, timeout_s: float) -> Connection:
        try:
            connection = _connection(self._login, self._config_file, timeout_s)
        except FileNotFoundError:
            raise UnreachableError(
                "this machine: ssh is not installed", "sudo apt-get install openssh-client"
            ) from None
        except (ValueError, OSError, subprocess.TimeoutExpired) as error:
            file = f"-F {self._config_file} " if self._config_file else ""
            raise UnreachableError(
                f"{self.place}: ssh configuration: {error}", f"check it: ssh {file}-G {self._login}"
            ) from error
        where = f"{self.place} ({connection.user}@{connection.host}:{connection.port})"
        scan = f"ssh-keyscan -p {connection.port} {connection.host}"
        try:
            _log_in(connection, timeout_s)
        except UnknownHostKey as error:
            raise UnreachableError(
                f"{where}: {error}",
                "compare it with the machine's own (there: ssh-keygen -lf /etc/ssh/ssh_host_*.pub), "
                f"then: {scan} >> ~/.ssh/known_hosts",
            ) from error
        except paramiko.BadHostKeyException as error:
            raise UnreachableError(
                f"{where}: its host key is not the one in known_hosts: another machine answers, or it was set up anew",
                f"if that was you: ssh-keygen -R {error.hostname}, then {scan} >> ~/.ssh/known_hosts",
            ) from error
        except paramiko.PasswordRequiredException as error:
            raise UnreachableError(
                f"{where}: its key has a passphrase and no agent holds it", "eval $(ssh-agent) && ssh-add"
            ) from error
        except paramiko.AuthenticationException as error:
            raise UnreachableError(
                f"{where}: the login is refused ({error})",
                f"try by hand: ssh -p {connection.port} {connection.user}@{connection.host}",
            ) from error
        except socket.gaierror as error:
            raise UnreachableError(
                f"{self.place}: the host name {connection.host} does not resolve",
                f"check it with: getent hosts {connection.host}, or name its address in cluster.yaml",
            ) from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise UnreachableError(
                f"{where}: cannot be reached: {_why(error)}", f"try by hand: ssh -p {connection.port} {connection.host}"
            ) from error
        connection.transport.set_keepalive(_KEEPALIVE_S)
        return connection


def _line(argv: Sequence[str]) -> str:
    """The command line for the login shell, whichever it is: bash prints the mark, and becomes the command."""
    # Between quotes csh takes no newline, expands `!`, and has room for 1024 characters; fish reads `\\` as one `\`.
    coded = re.sub(rb"[^ -~]|['!\\]", lambda found: b"\\0%03o" % ord(found[0]), shlex.join(argv).encode()).decode()
    words = "' '".join(re.findall(r"(?:\\0...|[^\\]){1,200}", coded))
    # csh leaves copies of its input and output open: who waits for the end of the output would wait for a daemon's.
    # A bash that sshd or another bash has become reads ~/.bashrc once more, unless SHLVL says that it is a deeper one.
    begin = f"echo {BEGIN}; echo {BEGIN} >&2; PATH=$PATH:{MORE_PATH}; exec 3>&- 4>&- 5>&- 6>&-"
    return f"exec env SHLVL=3 bash -c '{begin}; printf -v line %b \"$@\"; eval \"exec $line\"' bash '{words}'"


def _own(printed: bytearray) -> tuple[bool, bytearray]:
    """Whether a command has begun, and what it printed itself; all that there is where it has not."""
    before, mark, after = printed.partition(_MARK)
    return bool(mark), after if mark else before


def _log_in(connection: Connection, timeout_s: float) -> None:
    until = time.monotonic() + _BUSY_S
    pause_s = 0.1
    while True:
        began = time.monotonic()
        try:
            connection.open()
            return
        except (OSError, EOFError, paramiko.SSHException) as error:
            now = time.monotonic()
            # One that is silent was waited for already; one that answers and hangs up at once may have time later.
            if not _hung_up(error) or now - began >= timeout_s or now + pause_s > until:
                raise
        # Not all at the same moment again.
        time.sleep(pause_s * random.uniform(0.5, 1))
        pause_s = min(2 * pause_s, 1.0)


def _hung_up(error: BaseException) -> bool:
    """Whether the connection was closed before the other side said that it speaks SSH."""
    return isinstance(error, ConnectionResetError) or "Error reading SSH protocol banner" in str(error)


def _connection(login: str, config_file: str, timeout_s: float) -> Connection:
    return _hop(login, config_file, timeout_s, None)


def _options(login: str, config_file: str, timeout_s: float) -> paramiko.SSHConfig:
    """The settings of one login as `ssh -G` prints them: OpenSSH evaluates Host, Match and Include.

    Raises ValueError with its message for a file that ssh refuses.
    """
    file = ["-F", str(Path(config_file).expanduser())] if config_file else []
    port = ["-p", port_of(login)] if port_of(login) else []
    argv = ["ssh", "-TG", *file, *port, "--", destination_of(login)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=timeout_s)
    if done.returncode:
        raise ValueError(done.stderr.partition("\n")[0].strip() or f"ssh -G: exit {done.returncode}")
    lines = ["Host *"]
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        # Of the default identity files paramiko needs those that exist.
        if key in _SETTINGS or (key == "identityfile" and Path(value).expanduser().is_file()):
            lines.append(line)
    return paramiko.SSHConfig.from_text("\n".join(lines))


def _known_keys(files: Sequence[Path]) -> paramiko.HostKeys:
    return _load_keys(tuple((file, file.stat().st_mtime_ns) for file in files if file.is_file()))


@functools.lru_cache(maxsize=8)
def _load_keys(stamped: tuple[tuple[Path, int], ...]) -> paramiko.HostKeys:
    keys = paramiko.HostKeys()
    for file, _ in stamped:
        keys.load(str(file))
    return keys


def _hop(
    login: str, config_file: str, timeout_s: float, before: Connection | None, towards: Sequence[str] = ()
) -> Connection:
    """A connection through the one `before` it, or through what its ssh_config says, as a way `towards` other hosts.

    Raises ValueError where jump hosts need each other.
    """
    if login in towards:
        raise ValueError(f"ProxyJump leads in a circle: {' -> '.join((*towards, login))}")
    connection = Connection(
        login,
        # lazy: without the settings of `fabric.yaml` files on this machine
        config=Config(ssh_config=_options(login, config_file, timeout_s), lazy=True),
        # not None: fabric takes `ProxyJump none` for a host, and the last of several hosts for the first
        gateway=before or False,
        connect_timeout=timeout_s,
        connect_kwargs={"banner_timeout": timeout_s, "auth_timeout": timeout_s, "channel_timeout": timeout_s},
    )
    if before is None:
        connection.gateway = _gateway(connection, config_file, timeout_s, (*towards, login))
    _trust_only_known_hosts(connection)
    return connection


def _gateway(
    connection: Connection, config_file: str, timeout_s: float, towards: Sequence[str]
) -> Connection | str | None:
    """The last of its jump hosts, or its ProxyCommand: `ssh -G` has one of them at most."""
    options, gateway = connection.ssh_config, None
    if "proxyjump" not in options:
        command = options.get("proxycommand")
        return command and str(command)
    for hop in options["proxyjump"].split(","):
        # where `Host *` has a jump host, this may be it
        if connection.derive_shorthand(hop)["host"] in (connection.host, connection.original_host):
            return None
        gateway = _hop(hop, config_file, timeout_s, gateway, towards)
    return gateway


def _trust_only_known_hosts(connection: Connection) -> None:
    """fabric accepts any key by default and reads no known_hosts file."""
    connection.client.set_missing_host_key_policy(_Refuse())
    options = connection.ssh_config
    files = options.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2").split()
    files += options.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2").split()
    name = connection.host if connection.port == 22 else f"[{connection.host}]:{connection.port}"
    known = _known_keys([Path(file).expanduser() for file in files]).lookup(options.get("hostkeyalias", name))
    for kind, key in known.items() if known else ():
        connection.client.get_host_keys().add(name, kind, key)


def _why(error: BaseException) -> str:
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        return "; ".join(dict.fromkeys(str(each) for each in error.errors.values()))
    return str(error) or type(error).__name__
