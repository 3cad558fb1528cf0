"""Commands over SSH. The only module that uses fabric and paramiko.

`ssh -G` evaluates `~/.ssh/config`, and fabric opens the connection. Commands use its channels as bytes, because
fabric's `run` decodes output and interpolates variables into shell code. A broken connection is opened again.
"""

import base64
import hashlib
import logging
import random
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import paramiko
from fabric import Config, Connection

from cluster.errors import UnreachableError
from cluster.spec.model import Node
from cluster.transport import openssh
from cluster.transport.local import Completed
from cluster.transport.openssh import after_mark, destination, remote_line

CONNECT_TIMEOUT_S = 8.0
#: How long to wait for the end of a closed connection's thread.
_THREAD_S = 5.0
#: Seconds of login retries: sshd refuses concurrent logins above its MaxStartups.
_BUSY_S = 20.0
#: Interval of keep-alive messages, which detect a dead connection.
_KEEPALIVE_S = 5
_CHUNK = 1 << 16
#: Exceptions of a connection that failed or broke.
_BROKEN = (OSError, EOFError, paramiko.SSHException)
#: The settings of `ssh -G` that paramiko and fabric use. Timeouts are set for each connection.
_SETTINGS = (
    *("hostname", "user", "port", "forwardagent", "proxyjump", "proxycommand"),
    *("userknownhostsfile", "globalknownhostsfile", "hostkeyalias"),
)
# Without a handler paramiko prints tracebacks of exceptions that this module reports as errors.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class UnknownHostKey(paramiko.SSHException):
    """The host key is in no known_hosts file."""


class _Refuse(paramiko.MissingHostKeyPolicy):
    """Rejects unknown host keys: trust on first use would also accept an attacker's key."""

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
        raise UnknownHostKey(f"its host key {key.get_name()} SHA256:{digest} is in no known_hosts file")


class SshShell:
    """Runs commands on a node over one connection."""

    def __init__(self, node: Node) -> None:
        self.name = node.name
        self._node = node
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def run(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float = 60.0) -> Completed:
        """Run a command. Raise UnreachableError if the connection fails or the command does not end in `timeout_s`."""
        until = time.monotonic() + timeout_s
        channel = self._start(argv, timeout_s)
        # Always close the channel: the command then ends with SIGPIPE or SIGHUP.
        try:
            out, errors = bytearray(), bytearray()
            channel.settimeout(timeout_s)
            channel.sendall(stdin.encode())
            channel.shutdown_write()
            for read, into in ((channel.recv, out), (channel.recv_stderr, errors)):
                channel.settimeout(max(0.05, until - time.monotonic()))
                while chunk := read(_CHUNK):
                    into += chunk
                    channel.settimeout(max(0.05, until - time.monotonic()))
            if not channel.status_event.wait(max(0.05, until - time.monotonic())):
                raise TimeoutError
            code = channel.recv_exit_status()
            if code == -1:
                raise EOFError("no exit code")
        except TimeoutError as error:
            shown = " ".join(argv[:3]).splitlines()[0][:60]
            raise UnreachableError(f"{self.name}: `{shown}` did not answer within {timeout_s:g} s") from error
        except _BROKEN as error:
            self.close()
            raise UnreachableError(f"{self.name}: the connection broke: {error}") from error
        finally:
            channel.close()
        has_mark, text = after_mark(out)
        done = Completed(code, text, after_mark(errors)[1])
        if not has_mark:
            hint = f'try by hand: {self._by_hand()} "bash --version"'
            raise UnreachableError(f"{self.name}: its login shell does not run commands: {done.last_line}", hint)
        return done

    def ping(self) -> bool:
        """Return whether sshd responds to a keep-alive request, which needs no new process there."""
        with self._lock:
            connection = self._connection
        if connection is None or not connection.is_connected:
            return False
        try:
            connection.transport.global_request("keepalive@openssh.com", wait=True)
        except _BROKEN:
            return False
        return bool(connection.transport.is_active())

    def close(self) -> None:
        """Close the connection; the next command opens another."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            transport = connection.transport
            connection.close()
            proxy = getattr(transport, "sock", None)
            if isinstance(proxy, paramiko.ProxyCommand):
                # paramiko kills the program, and leaves its pipes open. Its thread kills it again at its end.
                transport.join(_THREAD_S)
                proxy.process.wait()
                for pipe in filter(None, (proxy.process.stdin, proxy.process.stdout, proxy.process.stderr)):
                    pipe.close()

    def _start(self, argv: Sequence[str], timeout_s: float) -> paramiko.Channel:
        limit_s = min(timeout_s, CONNECT_TIMEOUT_S)
        while True:
            transport, fresh = self._transport(limit_s)
            try:
                channel = transport.open_session(timeout=limit_s)
                channel.exec_command(remote_line(argv, marked=True))
                return channel
            except _BROKEN as error:
                self.close()
                if fresh:  # an old connection may be dead: retry with a new one
                    raise UnreachableError(f"{self.name}: the connection broke: {error}") from error

    def _transport(self, timeout_s: float) -> tuple[paramiko.Transport, bool]:
        with self._lock:
            if self._connection is not None and self._connection.is_connected:
                return self._connection.transport, False
            self._connection = self._open(timeout_s)
            return self._connection.transport, True

    def _open(self, timeout_s: float) -> Connection:
        try:
            connection = _connection(self._node, timeout_s)
        except FileNotFoundError:
            hint = "sudo apt-get install openssh-client"
            raise UnreachableError("this machine: ssh is not installed", hint) from None
        except (ValueError, OSError, subprocess.TimeoutExpired) as error:
            hint = f"check it: {self._by_hand('-G')}"
            raise UnreachableError(f"{self.name}: ssh configuration: {error}", hint) from error
        try:
            _log_in(connection, timeout_s)
        except _BROKEN as error:
            why, hint = _explain(error, connection, self._by_hand())
            where = f"{self.name} ({connection.user}@{connection.host}:{connection.port})"
            raise UnreachableError(f"{where}: {why}", hint) from error
        connection.transport.set_keepalive(_KEEPALIVE_S)
        return connection

    def _by_hand(self, *options: str) -> str:
        """Return the command that logs in by hand, also through the jump hosts of the ssh_config."""
        chosen = openssh.options(self._node.login, self._node.ssh_config)
        return shlex.join(["ssh", *chosen, *options, destination(self._node.login)])


def _explain(error: Exception, connection: Connection, command: str) -> tuple[str, str]:
    """Return why the login failed, and what to type next; `command` logs in by hand."""
    host, port = connection.host, connection.port
    scan = f"ssh-keyscan -p {port} {host} >> ~/.ssh/known_hosts"
    if isinstance(error, UnknownHostKey):
        return str(error), f"compare it with `ssh-keygen -lf /etc/ssh/ssh_host_*.pub` on the machine, then: {scan}"
    if isinstance(error, paramiko.BadHostKeyException):
        why = "its host key is not the one in known_hosts: the machine is new, or another one answers"
        return why, f"if the machine is new: ssh-keygen -R {error.hostname}, then {scan}"
    if isinstance(error, paramiko.PasswordRequiredException):
        return "its key has a passphrase and is not in an agent", "run: eval $(ssh-agent) && ssh-add"
    by_hand = f"try by hand: {command}"
    if isinstance(error, paramiko.AuthenticationException):
        return f"the login is refused ({error})", by_hand
    if isinstance(error, socket.gaierror):
        how = f"check it with: getent hosts {host}, or set its IP address as login in cluster.yaml"
        return f"the host name {host} does not resolve", how
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        return f"cannot be reached: {'; '.join(dict.fromkeys(map(str, error.errors.values())))}", by_hand
    return f"cannot be reached: {error or type(error).__name__}", by_hand


def _log_in(connection: Connection, timeout_s: float) -> None:
    until = time.monotonic() + _BUSY_S
    pause_s = 0.1
    while True:
        began = time.monotonic()
        try:
            connection.open()
            return
        except _BROKEN as error:
            now = time.monotonic()
            # Retry only if sshd closed the connection at once, as above MaxStartups; not after a timeout.
            is_refused = isinstance(error, ConnectionResetError) or "Error reading SSH protocol banner" in str(error)
            if not is_refused or now - began >= timeout_s or now + pause_s > until:
                raise
        # Spread the retries of many threads.
        time.sleep(pause_s * random.uniform(0.5, 1))
        pause_s = min(2 * pause_s, 1.0)


def _connection(node: Node, timeout_s: float) -> Connection:
    options = _options(node, timeout_s)
    connection = Connection(
        node.login,
        # lazy: do not read `fabric.yaml` files of this machine
        config=Config(ssh_config=options, lazy=True),
        # False, not None: fabric misreads `ProxyJump none` and several jump hosts
        gateway=False,
        connect_timeout=timeout_s,
        connect_kwargs={"banner_timeout": timeout_s, "auth_timeout": timeout_s, "channel_timeout": timeout_s},
    )
    connection.gateway = _proxy_command(connection, node.ssh_config)
    if connection.gateway:  # the banner comes after the logins to all jump hosts
        hops = connection.ssh_config.get("proxyjump", "").count(",") + 1
        connection.connect_timeout = connection.connect_kwargs["banner_timeout"] = timeout_s * (1 + hops)
    _trust_only_known_hosts(connection)
    return connection


def _proxy_command(connection: Connection, config_file: str) -> str | None:
    """Return the ProxyCommand; for a ProxyJump that of OpenSSH, which reads the settings of the jump hosts."""
    if "proxyjump" not in connection.ssh_config:
        return cast("str | None", connection.ssh_config.get("proxycommand"))
    before, _, last = connection.ssh_config["proxyjump"].rpartition(",")
    words = [*openssh.WITHOUT_PROMPTS, *openssh.options(last, config_file), *(["-J", before] if before else [])]
    return shlex.join([*words, "-W", f"[{connection.host}]:{connection.port}", "--", destination(last)])


def _options(node: Node, timeout_s: float) -> paramiko.SSHConfig:
    """Return a login's settings from `ssh -G`, which evaluates Host, Match and Include. Raises ValueError."""
    argv = ["ssh", "-TG", *openssh.options(node.login, node.ssh_config), "--", destination(node.login)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=timeout_s)
    if done.returncode:
        raise ValueError(done.stderr.partition("\n")[0].strip() or f"ssh -G: exit {done.returncode}")
    lines = ["Host *"]
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        # paramiko fails for identity files that do not exist.
        if key in _SETTINGS or (key == "identityfile" and Path(value).expanduser().is_file()):
            lines.append(line)
    return paramiko.SSHConfig.from_text("\n".join(lines))


def _trust_only_known_hosts(connection: Connection) -> None:
    """Check host keys against known_hosts: by default fabric accepts any key and reads no such file."""
    connection.client.set_missing_host_key_policy(_Refuse())
    options = connection.ssh_config
    files = options.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2").split()
    files += options.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2").split()
    known = paramiko.HostKeys()
    for file in (Path(file).expanduser() for file in files):
        if file.is_file():
            known.load(str(file))
    name = connection.host if connection.port == 22 else f"[{connection.host}]:{connection.port}"
    for kind, key in (known.lookup(options.get("hostkeyalias", name)) or {}).items():
        connection.client.get_host_keys().add(name, kind, key)
