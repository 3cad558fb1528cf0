"""Commands on this machine."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, BinaryIO, cast

from cluster.errors import UnreachableError
from cluster.shells.result import MORE_PATH, Completed


@dataclass
class LocalStream:
    """A child process with pipes."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    @property
    def stdin(self) -> BinaryIO:
        """The command's input."""
        return cast(BinaryIO, self.process.stdin)

    @property
    def stdout(self) -> BinaryIO:
        """The command's output."""
        return cast(BinaryIO, self.process.stdout)

    def wait(self, timeout_s: float) -> Completed:
        """Raises UnreachableError when the command does not end in time."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(f"this machine: a command did not end within {timeout_s:g} s") from error
        self.errors.seek(0)
        return Completed(code, "", self.errors.read().decode(errors="replace"))


class LocalShell:
    """Runs commands as children of this process."""

    def run(self, argv: Sequence[str], *, stdin: str | bytes = "", timeout_s: float = 60.0) -> Completed:
        """Raises UnreachableError when there is no such program or it does not end in `timeout_s`."""
        try:
            done = subprocess.run(
                list(argv),
                input=stdin.encode() if isinstance(stdin, str) else stdin,
                capture_output=True,
                timeout=timeout_s,
                check=False,
                env=_environment(),
                # A Ctrl-C in the terminal is for the launcher alone: it decides what to stop and in which order.
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise UnreachableError(f"this machine: no program {argv[0]!r}") from error
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(
                f"this machine: `{' '.join(argv[:3])}` did not answer within {timeout_s:g} s"
            ) from error
        return Completed(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    @contextmanager
    def stream(self, argv: Sequence[str]) -> Iterator[LocalStream]:
        """Raises UnreachableError when there is no such program."""
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=_environment(),
                    start_new_session=True,
                )
            except FileNotFoundError as error:
                raise UnreachableError(f"this machine: no program {argv[0]!r}") from error
            try:
                yield LocalStream(process, errors)
            finally:
                if process.poll() is None:
                    process.terminate()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        with suppress(BrokenPipeError):
                            pipe.close()
                process.wait()

    def ping(self) -> bool:
        """It runs us."""
        return True

    def close(self) -> None:
        """Nothing is held."""


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:{MORE_PATH}"}
