"""Command line of the trainer: one module per command; torch is imported only when a command runs."""

from itertools import zip_longest
from typing import Any

import typer
from typer.core import TyperCommand

from trainer.cli.bench import TRAIN_OPTIONS, bench
from trainer.cli.data import data
from trainer.cli.export import export
from trainer.cli.hyp import hyp
from trainer.cli.info import info
from trainer.cli.predict import predict
from trainer.cli.profile import profile
from trainer.cli.train import train
from trainer.cli.val import val
from trainer.cli.verify import verify

WITHOUT_VALUE = {"--resume": "last", "--cache": "ram"}  # the value of an option given without one, as in YOLOv5
LISTS = ("--freeze", "--classes")  # options that take several numbers, as in YOLOv5


class Command(TyperCommand):
    """A command that also accepts `--freeze 0 1 2`, and `--resume` without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join the numbers of LISTS to one value, insert the values of WITHOUT_VALUE, then parse."""
        joined: list[str] = []
        for value, after in zip_longest(args, args[1:], fillvalue="--"):
            if value in WITHOUT_VALUE and after.startswith("--"):
                joined += [value, WITHOUT_VALUE[value]]
            elif value.isdecimal() and len(joined) > 1 and joined[-2] in LISTS and joined[-1][:1].isdecimal():
                joined[-1] += f" {value}"
            else:
                joined.append(value)
        return super().parse_args(ctx, joined)


HELP = "Train and use a detector: in one process, under torchrun, or on several machines with clusterctl."
app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False, help=HELP)
for command in (train, val, predict, export, info, hyp):
    app.command(cls=Command)(command)
app.command(cls=Command, context_settings=TRAIN_OPTIONS)(verify)
app.command(cls=Command, context_settings=TRAIN_OPTIONS)(profile)
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")

__all__ = ["app"]
