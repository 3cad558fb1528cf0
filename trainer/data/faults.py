"""What is wrong with a data set: each fault with its file and line, and the error that refuses the set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import TrainerError

_SHOWN = 3  # faults that an error or the screen names


@dataclass(frozen=True)
class Fault:
    """One thing to put right; `line` counts from 1, 0 is the file as a whole. A warning does not stop a training."""

    file: str
    line: int
    what: str
    hint: str = ""
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}" if self.line else f"{self.file}: {self.what}"


class BadData(TrainerError):
    """A data set with `faults` (at least one): the message counts them and names the first few."""

    def __init__(self, faults: Sequence[Fault], hint: str = "") -> None:
        """`hint` is the next step for several faults, and goes with the fault's own where there is one."""
        self.faults, self._next = list(faults), hint
        count = len(self.faults)
        if count == 1:
            super().__init__(str(faults[0]), "; ".join(filter(None, (faults[0].hint, hint))))
            return
        first = "; ".join(map(str, self.faults[:_SHOWN]))
        more = f"; and {count - _SHOWN} more" if count > _SHOWN else ""
        super().__init__(f"{count} faults: {first}{more}", hint or self.faults[0].hint)

    def __reduce__(self) -> tuple[type[BadData], tuple[list[Fault], str]]:
        return BadData, (self.faults, self._next)  # from another process


def note_left_out(faults: Sequence[Fault], folder: Path) -> list[str]:
    """Lines for the screen that say what was left out; where these are many, the whole list goes to a file."""
    lines = [f"left out: {fault}" for fault in faults[:_SHOWN]]
    if len(faults) > _SHOWN:
        path = folder / "left_out.txt"
        path.write_text("".join(f"{fault}\n" for fault in faults), encoding="utf-8")
        lines.append(f"left out: {len(faults) - _SHOWN} more, all of them in {path}")
    return lines
