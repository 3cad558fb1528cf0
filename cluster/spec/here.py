"""The machine that launches, as far as a job depends on it. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.spec.model import Gpu


@dataclass(frozen=True)
class Here:
    """Facts about the launching machine that the defaults of a job depend on.

    `gpus` are the visible GPU ids, `user` is the UID:GID for containers. `exists` and `is_folder` examine a path.
    `variables` are the names of environment variables.
    `read` returns the content of a file, b"" if there is no regular file, or None if it is too large or not readable.
    """

    cwd: str
    user: str
    python: str
    gpus: tuple[Gpu, ...] = ()
    variables: tuple[str, ...] = ()
    exists: Callable[[str], bool] = lambda path: False
    is_folder: Callable[[str], bool] = lambda path: False
    read: Callable[[str], bytes | None] = lambda path: b""
