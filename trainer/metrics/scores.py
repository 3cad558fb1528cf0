"""Base of the scores of a validation: columns of results.csv, and the table by class."""

import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


class Metric(Protocol):
    """Counts of a rank's images, from which the scores are computed after the ranks' counts are merged."""

    def merge(self, other: Any, /) -> None:
        """Add the counts of another metric of the same type."""

    def compute(self) -> "Scores":
        """Return the scores."""


class Scores:
    """Means over the classes with ground truth, and the scores of each."""

    COLUMNS: ClassVar[tuple[str, ...]]  # of results.csv: attributes
    MAIN: ClassVar[str]  # the score of a class: an attribute in `per_class`
    TABLE: ClassVar[
        tuple[tuple[str, str, str], ...]
    ]  # title, attribute of the means, attribute in `per_class`
    per_class: dict[str, Any]

    @property
    def fitness(self) -> float:
        """The score that selects the best checkpoint; higher is better."""
        return float(getattr(self, self.COLUMNS[0]))

    def columns(self) -> dict[str, float]:
        """Return the values of the columns of results.csv."""
        return {name: getattr(self, name) for name in self.COLUMNS}

    def by_class(self, names: Sequence[str]) -> list[float]:
        """Return the main score of each class, nan without ground truth."""
        return [getattr(self.per_class[k], self.MAIN) if k in self.per_class else float("nan") for k in names]

    def table(self) -> str:
        """Return a table of all classes, then of each with ground truth, as wide as the terminal or as needed."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("class", overflow="fold")
        for title, _, _ in self.TABLE:
            table.add_column(title, justify="right", no_wrap=True)
        rows = [("all", [getattr(self, mean) for _, mean, _ in self.TABLE])]
        rows += [
            (name, [getattr(one, of) for _, _, of in self.TABLE]) for name, one in self.per_class.items()
        ]
        for k, (name, values) in enumerate(rows):
            cells = (f"{value:.3f}" if isinstance(value, float) else f"{value:,}" for value in values)
            table.add_row(name.replace("[", r"\["), *cells, style="" if k else "bold")
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
        with console.capture() as captured:
            console.print(table)
        return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())
