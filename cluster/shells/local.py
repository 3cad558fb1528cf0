"""Commands on this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from cluster.errors import UnreachableError
from cluster.shells import Completed


class LocalShell:
    """Runs commands as children of this process; `env` replaces the environment when given."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = env

    def run(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float = 60.0) -> Completed:
        """Raises UnreachableError when there is no such program or it does not end in `timeout_s`."""
        try:
            done = subprocess.run(
                list(argv),
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
                env=None if self._env is None else dict(self._env),
                # A Ctrl-C in the terminal is for the launcher alone: it decides what to stop and in which order.
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise UnreachableError(f"this machine: no program {argv[0]!r}") from error
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(
                f"this machine: `{' '.join(argv[:3])}` did not answer within {timeout_s:g} s"
            ) from error
        return Completed(done.returncode, done.stdout, done.stderr)
