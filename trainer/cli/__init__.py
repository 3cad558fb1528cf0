"""The verbs of the command line, a file each; torch is only loaded once there is something to do."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import typer
from typer.core import TyperCommand

from trainer.cli.bench import OTHERS, bench
from trainer.cli.data import data
from trainer.cli.export import export
from trainer.cli.info import info
from trainer.cli.predict import predict
from trainer.cli.profile import profile
from trainer.cli.train import train
from trainer.cli.val import val
from trainer.cli.verify import verify

BARE = {"--resume": "last", "--cache": "ram"}  # what these mean without a value, as in YOLOv5
LISTS = ("--freeze", "--classes")  # as in YOLOv5, several numbers may follow these


class Verb(TyperCommand):
    """A command that takes `--freeze 0 1 2`, and `--resume` without a value, which click by itself would not."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments with such numbers joined to one value, and BARE's values where none is given."""
        joined: list[str] = []
        for value, after in zip_longest(args, args[1:], fillvalue="--"):
            if value in BARE and after.startswith("--"):
                joined += [value, BARE[value]]
            elif value.isdecimal() and len(joined) > 1 and joined[-2] in LISTS and joined[-1][:1].isdecimal():
                joined[-1] += f" {value}"
            else:
                joined.append(value)
        return super().parse_args(ctx, joined)


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Trains a detector: alone, under torchrun, or on many machines with clusterctl.",
)
for verb in (train, val, predict, export, verify, info):
    app.command(cls=Verb)(verb)
app.command(cls=Verb, context_settings=OTHERS)(profile)
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")

__all__ = ["app"]
