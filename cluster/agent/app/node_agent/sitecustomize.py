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
    from types import FrameType, TracebackType

#: The signals at which a rank's Python writes its stack: unused by Linux, Python and torch. A Python function handles
#: the first one, between two instructions of the program. The second one is for a program that is blocked in C:
#: faulthandler handles it at once, and reads frames that may be incomplete while Python runs. That ends the process by
#: SIGSEGV about once in 20,000 signals (Python 3.11).
STACK_SIGNAL, BLOCKED_SIGNAL = 50, 51
_MOST_FRAMES = 100  # as many as faulthandler writes


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
        write_stacks(path + ".stack")
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


def write_stacks(path: str) -> None:
    """Install the handlers that append the main thread's stack to a file, in faulthandler's format."""
    import atexit
    import faulthandler
    import signal

    file = open(path, "a")  # appended, because the agent truncates the file before each request

    def write(_: int, frame: FrameType | None) -> None:
        lines: list[str] = []
        while frame is not None and len(lines) < _MOST_FRAMES:
            code = frame.f_code
            lines.append('  File "{}", line {} in {}\n'.format(code.co_filename, frame.f_lineno or 0, code.co_name))
            frame = frame.f_back
        with contextlib.suppress(OSError, ValueError):
            os.write(file.fileno(), "".join(lines).encode("ascii", "backslashreplace"))

    signal.signal(STACK_SIGNAL, write)
    signal.siginterrupt(STACK_SIGNAL, False)
    faulthandler.register(BLOCKED_SIGNAL, file, all_threads=False)
    # Python would restore the default action, which ends the process, before its last steps.
    atexit.register(signal.signal, STACK_SIGNAL, signal.SIG_IGN)


if __name__ == "sitecustomize":
    record_exceptions()
