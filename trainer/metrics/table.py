"""The table of scores by class, as it stands on the screen."""

from __future__ import annotations

import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from trainer.metrics import BoxScores


def scores_table(scores: BoxScores) -> Table:
    """A row for all classes, then one for each that has ground truth."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("class", overflow="fold")
    for name in ("pictures", "boxes", "P", "R", "F1", "mAP50", "mAP50-95"):
        table.add_column(name, justify="right", no_wrap=True)
    means = (scores.precision, scores.recall, scores.f1, scores.map50, scores.map)
    table.add_row("all", str(scores.pictures), str(scores.boxes), *(f"{v:.3f}" for v in means), style="bold")
    for name, one in scores.per_class.items():
        values = (one.precision, one.recall, one.f1, one.map50, one.map)
        table.add_row(name.replace("[", r"\["), str(one.pictures), str(one.boxes), *(f"{v:.3f}" for v in values))
    return table


def scores_text(scores: BoxScores) -> str:
    """The table as lines for stdout: as wide as the terminal, elsewhere as wide as it needs to be."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
    with console.capture() as captured:
        console.print(scores_table(scores))
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())
