"""Stacks of ranks: where the main thread of a rank is, as our `sitecustomize` writes it, and whether it has moved."""

from __future__ import annotations

import contextlib
import os
import re
import time

from .settings import Fields
from .sitecustomize import BLOCKED_SIGNAL, STACK_SIGNAL

#: The lines of a loop in which a rank polls are at most this far from each other.
LOOP_LINES = 2
#: faulthandler writes a stack in many parts. It is complete once the file has not grown for this time.
_COMPLETE_S = 0.02
#: A main thread that has not run Python for this time is in a call into C.
BLOCKED_S = 1.0
#: Modules in which a thread waits for the work of other threads or processes.
_WAITS = ("/threading.py", "/queue.py", "/selectors.py", "/concurrent/futures/_base.py")


class Stack:
    """The stack of a rank's main thread. `ask` for one, then `read` until `lines` is not None.

    Only the handlers of our `sitecustomize` are asked. A program without them, or with others for the signals, has no
    stack.
    """

    def __init__(self, path: str, pid: int) -> None:
        self._path = path
        self._pid = pid
        self._size = 0
        self._read_at = 0.0
        self._asked_at = 0.0
        self._is_forced = False
        #: Newest call first; [] without Python; None from a request until the answer is complete.
        self.lines: list[str] | None = []

    def ask(self) -> None:
        """Ask for a new stack. A rank that has not answered yet is not asked again: signals would queue up."""
        if self.lines is None:
            return
        self.lines = []
        self._size = 0
        if not catches(self._pid, STACK_SIGNAL):
            return
        with contextlib.suppress(OSError):
            os.truncate(self._path, 0)
            os.kill(self._pid, STACK_SIGNAL)
            self.lines = None
            self._asked_at = time.monotonic()
            self._is_forced = False

    def read(self) -> None:
        """Set `lines`, if the rank has answered. Ask it once more, in the other way, if it is blocked."""
        now = time.monotonic()
        if self.lines is not None or now - self._read_at < _COMPLETE_S:
            return
        self._read_at = now
        with contextlib.suppress(OSError), open(self._path, errors="replace") as file:
            text = file.read()
            before = self._size
            self._size = len(text)
            if text and len(text) == before:
                self.lines = [line.strip() for line in text.splitlines() if line.startswith("  File ")]
            if not text and not self._is_forced and now - self._asked_at > BLOCKED_S:
                self._is_forced = True
                if catches(self._pid, BLOCKED_SIGNAL):
                    os.kill(self._pid, BLOCKED_SIGNAL)


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    with contextlib.suppress(OSError, ValueError), open("/proc/%d/status" % pid) as file:
        caught = re.search(r"^SigCgt:\s*(\w+)", file.read(), re.MULTILINE)
        return bool(caught and int(caught.group(1), 16) >> (number - 1) & 1)
    return False


def is_same_place(one: list[str], other: list[str]) -> bool:
    """Return whether two stacks are equal, apart from the line within a short loop in the newest call."""
    if not one or not other or one[1:] != other[1:]:
        return False
    (path, line, function), (other_path, other_line, other_function) = _frame(one[0]), _frame(other[0])
    return (path, function) == (other_path, other_function) and abs(line - other_line) <= LOOP_LINES


def waits_for_others(stack: list[str]) -> bool:
    """Return whether the main thread waits for other threads or processes, which may work."""
    return bool(stack) and _frame(stack[0])[0].endswith(_WAITS)


def place(stack: list[str]) -> Fields:
    """Return where a rank waits: `collective` of torch.distributed or "", newest `call`, `place` in the program."""
    found: Fields = {"collective": "", "call": "", "place": ""}
    for path, number, function in map(_frame, stack):
        is_library = "-packages/" in path or "/lib/python3" in path or path.startswith("<")
        if "/torch/distributed/" in path or "/torch/nn/parallel/" in path or function == "backward":
            if function not in ("wrapper", "wait", "forward") and not function.startswith("_"):
                found["collective"] = function
        found["call"] = found["call"] or function
        if path and not is_library:
            found["place"] = "%s:%s" % (os.path.basename(path), number)
            break
    return found


def _frame(line: str) -> tuple[str, int, str]:
    """Return the path, line and function of `File "train.py", line 3 in main`."""
    match = re.match(r'File "(.*)", line (\d+) in (.*)', line)
    return (match.group(1), int(match.group(2)), match.group(3)) if match else ("", 0, "")
