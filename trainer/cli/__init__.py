"""The verbs of the command line, a file each; torch is only loaded once there is something to do."""

from __future__ import annotations

import typer

from trainer.cli.data import data
from trainer.cli.export import export
from trainer.cli.info import info
from trainer.cli.train import train
from trainer.cli.val import val

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Trains a detector: alone, under torchrun, or on many machines with clusterctl.",
)
for verb in (train, val, export, info):
    app.command()(verb)
app.add_typer(data, name="data")

__all__ = ["app"]
