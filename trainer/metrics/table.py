"""The table of scores by class, as it stands on the screen."""

from __future__ import annotations

import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from trainer.metrics import BoxScores
from trainer.metrics.accuracy import Accuracy
from trainer.metrics.overlap import Overlap


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


def accuracy_table(scores: Accuracy) -> Table:
    """A row for each class that has pictures: of these how many were found, and how many finds were right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("class", overflow="fold")
    for name in ("pictures", "found", "right"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("all", str(scores.pictures), f"{scores.top1:.3f}", f"{scores.top1:.3f}", style="bold")
    for name, one in scores.per_class.items():
        table.add_row(name.replace("[", r"\["), str(one.pictures), f"{one.recall:.3f}", f"{one.precision:.3f}")
    return table


def scores_text(scores: BoxScores) -> str:
    """The table of boxes as lines for stdout."""
    return _lines(scores_table(scores))


def accuracy_text(scores: Accuracy) -> str:
    """The table of classes as lines for stdout."""
    return _lines(accuracy_table(scores))


def overlap_table(scores: Overlap) -> Table:
    """A row for each class that occurs: its IoU, and the share of its pixels that was found."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("class", overflow="fold")
    for name in ("pixels", "IoU", "found"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("all", f"{scores.pixels:,}", f"{scores.miou:.3f}", f"{scores.accuracy:.3f}", style="bold")
    for name, one in scores.per_class.items():
        table.add_row(name.replace("[", r"\["), f"{one.pixels:,}", f"{one.iou:.3f}", f"{one.recall:.3f}")
    return table


def overlap_text(scores: Overlap) -> str:
    """The table of masks as lines for stdout."""
    return _lines(overlap_table(scores))


def _lines(table: Table) -> str:
    """As wide as the terminal, elsewhere as wide as it needs to be."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())
