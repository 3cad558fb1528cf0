"""Faults of a data set or a YAML file, with file and line."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import TrainerError

_SHOWN = 3  # faults in an error or on the screen


@dataclass(frozen=True)
class Fault:
    """A fault in a file; `line` counts from 1, 0 is the whole file. A warning does not stop a training."""

    file: str
    line: int
    what: str
    hint: str = ""
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}" if self.line else f"{self.file}: {self.what}"


class BadData(TrainerError):
    """Error of one or more faults. The message has their number and the first few."""

    def __init__(self, faults: Sequence[Fault], hint: str = "") -> None:
        """Use `hint` for several faults; for one fault, append it to the fault's own."""
        self.faults = list(faults)
        self._next = hint
        count = len(self.faults)
        if count == 1:
            super().__init__(str(faults[0]), "; ".join(filter(None, (faults[0].hint, hint))))
            return
        first = "; ".join(map(str, self.faults[:_SHOWN]))
        more = f"; and {count - _SHOWN} more" if count > _SHOWN else ""
        super().__init__(f"{count} faults: {first}{more}", hint or self.faults[0].hint)

    def __reduce__(self) -> tuple["type[BadData]", tuple[list[Fault], str]]:
        return BadData, (self.faults, self._next)  # for other processes


def summary(faults: Sequence[Fault]) -> str:
    """Return the numbers of faults and warnings."""
    warnings = sum(fault.warning for fault in faults)
    counts = {"fault": len(faults) - warnings, "warning": warnings}
    return ", ".join(f"{count or 'no'} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items())


def note_left_out(data: str, faults: Sequence[Fault], folder: Path | None = None) -> list[str]:
    """Return lines about the skipped entries of a dataset and its warnings.

    Long lists go into files in `folder` if there is one.
    """
    lines = []
    for kind, chosen in (
        ("left out", [fault for fault in faults if not fault.warning]),
        ("warning", [fault for fault in faults if fault.warning]),
    ):
        lines += [f"{kind}: {fault}" for fault in chosen[:_SHOWN]]
        if len(chosen) > _SHOWN:
            where = f"`trainer data check --data {data}` lists them"
            if folder:
                path = folder / f"{'warnings' if kind == 'warning' else 'left_out'}.txt"
                path.write_text("".join(f"{fault}\n" for fault in chosen), encoding="utf-8")
                where = f"all of them in {path}"
            lines.append(f"{kind}: {len(chosen) - _SHOWN} more, {where}")
    return [*lines, f"{data}: {summary(faults)}"] if lines else []


def first_of(count: int) -> str:
    """Return the end of a message about the first of several files or lines."""
    return f" (the first of {count:,})" if count > 1 else ""
