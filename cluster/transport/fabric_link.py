"""A connection by fabric. The only module that uses fabric and paramiko.

Commands use paramiko's channels as bytes, because fabric's `run` decodes output and interpolates variables into shell
code. paramiko gets its settings from `ssh -G` and its host keys from `ssh-keygen -F`, and reads no files but keys.
"""

import errno
import logging
import os
import random
import select
import socket
import subprocess
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from subprocess import DEVNULL

import paramiko
from fabric import Config, Connection

from cluster.transport import failures
from cluster.transport.interruption import refuse_interrupted
from cluster.transport.known_hosts import fingerprint
from cluster.transport.links import BrokenError, NotStartedError
from cluster.transport.login import Login
from cluster.transport.openssh import CONNECT_TIMEOUT_S, Ssh

#: Seconds of login retries: sshd refuses concurrent logins above its MaxStartups.
_BUSY_S = 20.0
#: Interval of keep-alive messages, which detect a dead connection.
_KEEPALIVE_S = 5
_CHUNK = 1 << 16
#: Milliseconds between two checks for Ctrl-C while a machine does not answer.
_POLL_MS = 100
#: Exceptions of a connection that broke.
_BROKEN = (OSError, EOFError, paramiko.SSHException)
#: paramiko's lists of algorithms, and the keywords that restrict them.
_ALGORITHMS = {
    "ciphers": "ciphers",
    "macs": "macs",
    "kex": "kexalgorithms",
    "keys": "hostkeyalgorithms",
    "pubkeys": "pubkeyacceptedalgorithms",
}
_RSA = ("rsa-sha2-512", "rsa-sha2-256")
# Without a handler paramiko prints tracebacks of exceptions that this module reports as errors.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class _OnlyKnown(paramiko.MissingHostKeyPolicy):
    """Accepts the known host keys. paramiko itself knows none, because it would keep only one of each kind."""

    def __init__(self, login: Login) -> None:
        self._known = {key.blob for key in login.known if not key.marker}

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        if key.asbytes() not in self._known:
            raise paramiko.SSHException(f"unknown host key {key.get_name()} {fingerprint(key.asbytes())}")


class _Transport(paramiko.Transport):
    """Asks no questions: paramiko would read the answers to a second factor from stdin."""

    def auth_interactive_dumb(self, *_: object, **__: object) -> list[str]:
        raise paramiko.AuthenticationException("the server asks for a second factor")


class FabricLink:
    """Runs commands over one connection of fabric."""

    socket = ""

    def __init__(self, login: Login, timeout_s: float) -> None:
        """Log in. Raises UnreachableError if no sshd answers; any other exception is a failure of paramiko."""
        self._connection, self._proxy = _log_in(login, min(timeout_s, CONNECT_TIMEOUT_S))
        self._connection.transport.set_keepalive(_KEEPALIVE_S)

    @property
    def is_open(self) -> bool:
        """Whether paramiko has not noticed an end of the connection."""
        return bool(self._connection.is_connected)

    def execute(self, line: str, data: bytes, until: float) -> tuple[int, bytes, bytes]:
        """See Link.execute."""
        left_s = _left_s(until)
        try:
            channel = self._connection.transport.open_session(timeout=min(left_s, CONNECT_TIMEOUT_S))
            channel.exec_command(line)
        except _BROKEN as error:
            raise NotStartedError(str(error)) from error
        # Always close the channel: the command then ends with SIGPIPE or SIGHUP.
        try:
            out = bytearray()
            errors = bytearray()
            channel.settimeout(left_s)
            channel.sendall(data)
            channel.shutdown_write()
            for read, into in ((channel.recv, out), (channel.recv_stderr, errors)):
                channel.settimeout(_left_s(until))
                while chunk := read(_CHUNK):
                    into += chunk
                    channel.settimeout(_left_s(until))
            if not channel.status_event.wait(_left_s(until)):
                raise TimeoutError
            code = channel.recv_exit_status()
            if code == -1:
                raise EOFError("no exit code")
        except TimeoutError:
            raise
        except _BROKEN as error:
            raise BrokenError(str(error)) from error
        finally:
            channel.close()
        return code, bytes(out), bytes(errors)

    def ping(self) -> bool:
        """See Link.ping. This asks for a keep-alive message, which needs no new process there."""
        transport = self._connection.transport
        try:
            transport.global_request("keepalive@openssh.com", wait=True)
        except _BROKEN:
            return False
        return bool(transport.is_active())

    def close(self) -> None:
        """Close the connection, and end the ssh to a jump host."""
        _close(self._connection, self._proxy)


def _left_s(until: float) -> float:
    """Return the seconds until a time of `time.monotonic`, and at least enough to fetch what is already there."""
    return max(0.05, until - time.monotonic())


def _log_in(login: Login, timeout_s: float) -> tuple[Connection, subprocess.Popen[bytes] | None]:
    until = time.monotonic() + _BUSY_S
    pause_s = 0.1
    while True:
        began = time.monotonic()
        connection = _connection(login, timeout_s)
        connection.connect_kwargs["sock"], proxy = _socket(login, timeout_s)
        try:
            connection.open()
            return connection, proxy
        except Exception as error:
            _close(connection, proxy)
            if proxy is not None:
                raise  # the ssh program can say what is wrong with the jump host
            now = time.monotonic()
            # sshd closes the connection at once above MaxStartups.
            is_reset = isinstance(error, ConnectionResetError)
            is_refused = is_reset or "Error reading SSH protocol banner" in str(error)
            has_timed_out = now - began >= timeout_s
            if has_timed_out or (is_refused and now + pause_s > until):
                raise failures.unreachable(login, str(error) or type(error).__name__) from error
            if not is_refused:
                raise
        # Spread the retries of many threads.
        time.sleep(pause_s * random.uniform(0.5, 1))
        pause_s = min(2 * pause_s, 1.0)


def _socket(login: Login, timeout_s: float) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """Return a socket that is connected to sshd, directly or by the ssh to a jump host. Raises UnreachableError."""
    if jump := Ssh(login.node, login.settings).jump():
        # Not paramiko's ProxyCommand, which does not notice the end of the program.
        ours, theirs = socket.socketpair()
        with theirs:
            pipe = theirs.fileno()
            proxy = subprocess.Popen(jump, stdin=pipe, stdout=pipe, stderr=DEVNULL, start_new_session=True)
        return ours, proxy
    host = login.settings.text("hostname")
    port = int(login.settings.text("port"))
    try:
        return _connected(host, port, timeout_s), None
    except socket.gaierror as error:
        raise failures.unresolved(login) from error
    except OSError as error:
        raise failures.unreachable(login, error.strerror or str(error)) from error


def _connected(host: str, port: int, timeout_s: float) -> socket.socket:
    """As socket.create_connection, but Ctrl-C ends it. Raises OSError, LaunchError."""
    failure: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        made = socket.socket(family, kind, protocol)
        try:
            made.setblocking(False)
            code = made.connect_ex(address)
            until = time.monotonic() + timeout_s
            connecting = select.poll()  # not select.select, which takes no descriptor above 1023
            connecting.register(made, select.POLLOUT)
            while code in (errno.EINPROGRESS, errno.EAGAIN):
                refuse_interrupted()
                if time.monotonic() > until:
                    code = errno.ETIMEDOUT
                elif connecting.poll(_POLL_MS):
                    code = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not code:
                made.settimeout(timeout_s)
                return made
            failure = OSError(code, os.strerror(code))
        except BaseException:
            made.close()
            raise
        made.close()
    raise failure or OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))


def _connection(login: Login, timeout_s: float) -> Connection:
    """Return a connection that has no socket yet."""
    settings = login.settings
    key_files = [Path(name).expanduser() for name in settings.every("identityfile")]
    existing_keys = [str(file) for file in key_files if file.is_file()]  # paramiko fails for missing files
    jumps = settings.text("proxyjump")
    hops = jumps.count(",") + 1 if jumps else 0
    connection = Connection(
        settings.text("hostname"),
        user=settings.text("user"),
        port=int(settings.text("port")),
        # lazy, and with an empty configuration: read no `fabric.yaml` and no ssh_config
        config=Config(ssh_config=paramiko.SSHConfig(), lazy=True),
        gateway=False,
        connect_timeout=timeout_s,
        connect_kwargs={
            "transport_factory": _Transport,
            "banner_timeout": timeout_s * (1 + hops),  # the logins to jump hosts come before the banner
            "auth_timeout": timeout_s,
            "channel_timeout": timeout_s,
            "key_filename": existing_keys,
            "look_for_keys": False,
            "allow_agent": settings.text("identitiesonly") != "yes",
            "disabled_algorithms": _disabled(login),
        },
    )
    connection.client.set_missing_host_key_policy(_OnlyKnown(login))
    return connection


def _disabled(login: Login) -> dict[str, list[str]]:
    """Return the algorithms of paramiko that the settings exclude, and those for host keys that are not known."""
    known = {key.kind for key in login.known if not key.marker}
    if "ssh-rsa" in known:
        known = (known - {"ssh-rsa"}) | {*_RSA}
    disabled = {}
    for kind, keyword in _ALGORITHMS.items():
        algorithms = getattr(paramiko.Transport, f"_preferred_{kind}")
        patterns = (login.settings.text(keyword) or "*").split(",")
        disabled[kind] = [name for name in algorithms if not _matches(name, patterns)]
        if kind == "keys":
            disabled[kind] += [name for name in algorithms if name not in known]
    if {"requiredrsasize", "rsaminsize"} & {*login.changed}:
        for kind in ("keys", "pubkeys"):
            disabled[kind] += _RSA
    return disabled


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _close(connection: Connection, proxy: subprocess.Popen[bytes] | None) -> None:
    connection.client.close()
    connection.connect_kwargs["sock"].close()
    if proxy is not None:
        proxy.terminate()
        proxy.wait()
