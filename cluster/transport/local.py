"""Commands on this machine, and the result of a command on any machine."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from subprocess import PIPE
from typing import IO, BinaryIO, cast

from cluster.errors import UnreachableError

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
        found: dict[str, list[str]] = {}
        for word, _, rest in (line.partition(" ") for line in self.out.splitlines()):
            found.setdefault(word, []).append(rest)
        return found

    @property
    def last_line(self) -> str:
        """The last line of stderr, else of stdout, else `exit CODE`, for error messages."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit {self.code}"


class LocalProcess:
    """A child process with pipes; `errors` is the file of its stderr."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self.stdin = cast(BinaryIO, process.stdin)
        self.stdout = cast(BinaryIO, process.stdout)
        self._process, self._errors = process, errors

    def wait(self, timeout_s: float) -> Completed:
        """Return the exit code and stderr. Raise UnreachableError if the command does not end in time."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(f"this machine: a command did not end within {timeout_s:g} s") from error
        self._errors.seek(0)
        return Completed(code, "", self._errors.read().decode(errors="replace"))


class LocalShell:
    """Runs commands as children of this process."""

    def run(self, argv: Sequence[str], *, stdin: str | bytes = "", timeout_s: float = 60.0) -> Completed:
        """Run a command. Raise UnreachableError if the program is missing or does not end in `timeout_s`."""
        data = stdin.encode() if isinstance(stdin, str) else stdin
        try:  # in a session of its own: Ctrl-C must reach only the launcher, which stops its commands in order
            done = subprocess.run(
                argv, input=data, capture_output=True, timeout=timeout_s, env=_environment(), start_new_session=True
            )
        except FileNotFoundError as error:
            raise UnreachableError(f"this machine: program {argv[0]!r} not found") from error
        except subprocess.TimeoutExpired as error:
            shown = " ".join(argv[:3])
            raise UnreachableError(f"this machine: `{shown}` did not answer within {timeout_s:g} s") from error
        return Completed(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    @contextmanager
    def stream(self, argv: Sequence[str]) -> Iterator[LocalProcess]:
        """Start a command. Raise UnreachableError if the program is missing."""
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    argv, stdin=PIPE, stdout=PIPE, stderr=errors, env=_environment(), start_new_session=True
                )
            except FileNotFoundError as error:
                raise UnreachableError(f"this machine: program {argv[0]!r} not found") from error
            try:
                yield LocalProcess(process, errors)
            finally:
                if process.poll() is None:
                    process.terminate()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        with suppress(BrokenPipeError):
                            pipe.close()
                process.wait()

    def ping(self) -> bool:
        """Return True: this machine always responds."""
        return True

    def close(self) -> None:
        """Do nothing: this machine needs no connection."""


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:{MORE_PATH}"}
