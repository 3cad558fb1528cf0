"""The `sitecustomize` of each rank: records its uncaught exception and its end, and writes its stack on a signal."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import time

TYPE_CHECKING = False  # the import of `typing` would delay each rank's start by some milliseconds
if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Any, Callable, NoReturn

#: The signals at which a rank's Python writes its stack: unused by Linux, Python and torch. A Python function handles
#: the first one, between two instructions of the program. The second one is for a program that is blocked in C:
#: faulthandler handles it at once, and reads frames that may be incomplete while Python runs. That ends the process by
#: SIGSEGV about once in 20,000 signals (Python 3.11).
STACK_SIGNAL = 50
BLOCKED_SIGNAL = 51
_MOST_FRAMES = 100  # as many as faulthandler writes


def record_exceptions() -> None:
    """Install hooks that record this rank's uncaught exception and the end of its program, and write its stack.

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
    record_end(path + ".end")
    before = sys.excepthook
    main = os.getpid()

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


def record_end(path: str) -> None:
    """Write the program's exit code to a file when it has ended, because Python may never finish its exit.

    It then waits for threads, and calls exit functions; `threading._shutdown` is the first of these steps. A program
    that leaves torch's process group has ended, too: NCCL can wait there forever.
    """
    main = os.getpid()
    exit_code = 0
    threads: Any = threading
    raise_exit = sys.exit
    shut_down = threads._shutdown

    def write(code: int) -> None:
        if os.getpid() == main:
            with contextlib.suppress(OSError):
                with open(path + ".tmp", "w") as file:
                    file.write(str(code))
                os.replace(path + ".tmp", path)

    def exit(status: Any = None, /) -> NoReturn:
        nonlocal exit_code
        exit_code = status if isinstance(status, int) else int(status is not None)
        raise_exit(status)

    def write_and_shut_down() -> None:
        has_raised = hasattr(sys, "last_type")  # an uncaught exception
        write(1 if has_raised else exit_code)
        shut_down()

    def wrap_destroy(module: Any) -> None:
        destroy = module.destroy_process_group

        def destroy_process_group(*arguments: Any, **options: Any) -> None:
            write(0)
            try:
                destroy(*arguments, **options)
            finally:  # the program continues
                with contextlib.suppress(OSError):
                    os.remove(path)

        destroy_process_group.__doc__ = destroy.__doc__
        module.destroy_process_group = destroy_process_group

    sys.exit = exit
    threads._shutdown = write_and_shut_down
    sys.meta_path.insert(0, _AfterImport("torch.distributed.distributed_c10d", wrap_destroy))


class _AfterImport:
    """A finder that calls a function with a module once it has been imported."""

    def __init__(self, name: str, call: Callable[[Any], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Return None, so that the next finder is asked, or the spec of the module with another loader."""
        if name != self._name:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec: Any = find_spec(name)
        run = spec.loader.exec_module

        def run_and_call(module: Any) -> None:
            run(module)
            self._call(module)

        spec.loader.exec_module = run_and_call
        return spec


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
            lines.append(
                '  File "{}", line {} in {}\n'.format(code.co_filename, frame.f_lineno or 0, code.co_name)
            )
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
