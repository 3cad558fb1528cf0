"""The `sitecustomize` of each rank: records its uncaught exception, and writes its stack on a signal."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time

TYPE_CHECKING = False  # the import of `typing` would delay each rank's start by some milliseconds
if TYPE_CHECKING:
    from types import TracebackType

#: The signal at which a rank's Python writes its stack: unused by Linux, Python and torch.
STACK_SIGNAL = 50


def record_exceptions() -> None:
    """Install an excepthook that records this rank's uncaught exception, and a handler that writes its stack.

    It runs as `sitecustomize`, imports the container image's own, and records only in a rank's first Python process.
    """
    path = os.environ.pop("CLUSTER_RANK_RECORD", "")
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)
    if not path:
        return
    if os.environ.get("CLUSTER_STALL_TIMEOUT"):
        import faulthandler

        # Appended, because the agent truncates the file before each request.
        faulthandler.register(STACK_SIGNAL, open(path + ".stack", "a"), all_threads=False)
    before, main = sys.excepthook, os.getpid()

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == main and issubclass(kind, Exception):
            with contextlib.suppress(Exception):
                lines = str(error).strip().splitlines() or [""]
                text = "{}: {}".format(kind.__qualname__, lines[0]) if lines[0] else kind.__qualname__
                with open(path + ".tmp", "w") as file:
                    json.dump({"time": time.time(), "error": text}, file)
                os.replace(path + ".tmp", path)  # a SIGTERM may end the rank before
        before(kind, error, trace)

    sys.excepthook = record


if __name__ == "sitecustomize":
    record_exceptions()
