"""Commands on this machine, and the result of a command on any machine."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from subprocess import PIPE

from cluster.errors import SlowError, UnreachableError

#: Folders of `ip`, docker and WSL's nvidia-smi that the PATH of a non-login session may lack.
MORE_PATH = "/usr/local/bin:/usr/sbin:/sbin:/usr/lib/wsl/lib"


@dataclass(frozen=True)
class Completed:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def by_word(self) -> dict[str, list[str]]:
        """The rests of the lines of stdout, by their first word."""
        processes: dict[str, list[str]] = {}
        for word, _, rest in (line.partition(" ") for line in self.out.splitlines()):
            processes.setdefault(word, []).append(rest)
        return processes

    @property
    def last_line(self) -> str:
        """The last line of stderr, else of stdout, else `exit CODE`, for error messages."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit {self.code}"


class LocalShell:
    """Runs commands as children of this process."""

    note = ""

    def run(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float = 60.0) -> Completed:
        """Run a command. Raise UnreachableError if its program is missing, SlowError if it exceeds `timeout_s`."""
        data = stdin.encode()
        env = environment()
        try:  # in a separate session: Ctrl-C must reach only the launcher, which stops its commands in order
            code, out, errors = _run(argv, data, env, timeout_s)
        except FileNotFoundError as error:
            raise UnreachableError(f"this machine: program {argv[0]!r} not found") from error
        except subprocess.TimeoutExpired as error:
            shown = " ".join(argv[:3])
            raise SlowError(f"this machine: `{shown}` did not answer within {timeout_s:g} s") from error
        return Completed(code, out.decode(errors="replace"), errors.decode(errors="replace"))

    def ping(self) -> bool:
        """Return True: this machine always responds."""
        return True

    def close(self) -> None:
        """Do nothing: this machine needs no connection."""


def _run(
    argv: Sequence[str], data: bytes, env: Mapping[str, str], timeout_s: float
) -> tuple[int, bytes, bytes]:
    with subprocess.Popen(
        argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env, start_new_session=True
    ) as process:
        try:
            out, errors = process.communicate(data, timeout_s)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what the command has started
            raise
        return process.returncode, out, errors


def environment() -> dict[str, str]:
    """Return the environment of commands on this machine, with a complete PATH."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:{MORE_PATH}"}
