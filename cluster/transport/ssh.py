"""Commands over SSH: a shell that logs in with fabric, or with the ssh program where fabric cannot."""

import threading
import time
from collections.abc import Sequence

from cluster.errors import ClusterError, SlowError, UnreachableError
from cluster.spec.model import Machine
from cluster.transport import login
from cluster.transport.interruption import refuse_interrupted
from cluster.transport.links import BrokenError, Link, NotStartedError
from cluster.transport.local import Completed
from cluster.transport.openssh import after_mark, remote_line
from cluster.transport.settings import by_hand


class SshShell:
    """Runs commands on a node over one connection, which it opens again when it breaks."""

    def __init__(self, node: Machine) -> None:
        self.name = node.name
        self.note = ""
        self._node = node
        self._link: Link | None = None
        self._lock = threading.Lock()

    @property
    def socket(self) -> str:
        """The socket of an open master connection, which rsync and other ssh programs use, or ""."""
        link = self._link
        return link.socket if link is not None and link.is_open else ""

    def run(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float = 60.0) -> Completed:
        """Run a command. Raise UnreachableError if the connection fails, SlowError if it exceeds `timeout_s`."""
        try:
            code, out, errors = self._execute(remote_line(argv, marked=True), stdin.encode(), timeout_s)
        except TimeoutError as error:
            shown = " ".join(argv[:3]).splitlines()[0][:60]
            raise SlowError(f"{self.name}: `{shown}` did not answer within {timeout_s:g} s") from error
        except (BrokenError, NotStartedError) as error:
            self.close()
            raise UnreachableError(f"{self.name}: the connection broke: {error}") from error
        has_mark, text = after_mark(out)
        done = Completed(code, text, after_mark(errors)[1])
        if not has_mark:
            hint = f'try by hand: {by_hand(self._node)} "bash --version"'
            raise UnreachableError(
                f"{self.name}: its login shell does not run commands: {done.last_line}", hint
            )
        return done

    def ping(self) -> bool:
        """Return whether sshd responds. This waits until the connection breaks."""
        link = self._link
        return link is not None and link.is_open and link.ping()

    def close(self) -> None:
        """Close the connection; the next command opens another."""
        with self._lock:
            link = self._link
            self._link = None
        if link is not None:
            link.close()

    def _execute(self, line: str, data: bytes, timeout_s: float) -> tuple[int, bytes, bytes]:
        until = time.monotonic() + timeout_s
        while True:
            link, is_fresh = self._connect(timeout_s)
            try:
                return link.execute(line, data, until)
            except NotStartedError:
                if is_fresh:
                    raise
                self.close()  # an old connection may be dead: retry with a new one

    def _connect(self, timeout_s: float) -> tuple[Link, bool]:
        with self._lock:
            if self._link is not None and self._link.is_open:
                return self._link, False
            if self._link is not None:
                self._link.close()
                self._link = None
            refuse_interrupted()
            self._link, why = _log_in(login.inspect(self._node), timeout_s)
            self.note = f"through ssh ({why})" if why else ""
            return self._link, True


def _log_in(found: login.Login, timeout_s: float) -> tuple[Link, str]:
    """Return a connection, and why the ssh program has opened it, "" for fabric. Raises UnreachableError."""
    why = login.why_ssh(found)
    if not why:
        # paramiko imports slowly
        from cluster.transport.fabric_link import FabricLink

        try:
            return FabricLink(found, timeout_s), ""
        except ClusterError:
            raise
        except Exception as error:  # whatever paramiko cannot do, ssh may be able to
            why = login.why_ssh(found, error)
    from cluster.transport.ssh_link import SshLink

    return SshLink(found, timeout_s), why
