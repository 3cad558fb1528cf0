"""Command line of the trainer: one module per command; torch is imported only when a command runs."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import typer

from trainer.cli.bench import TRAIN_OPTIONS, bench
from trainer.cli.data import data
from trainer.cli.export import export
from trainer.cli.help import CONTEXT, HelpCommand, HelpGroup
from trainer.cli.hyp import hyp
from trainer.cli.info import info
from trainer.cli.predict import predict
from trainer.cli.profile import profile
from trainer.cli.train import train
from trainer.cli.val import val
from trainer.cli.verify import verify
from trainer.cli.yolo import ANY_WORDS, yolo
from trainer.config.families import named_families
from trainer.config.presets import PRESETS, TASKS, Preset, family_presets
from trainer.config.settings import option_of

# The value of an option given without one, as in YOLOv5.
WITHOUT_VALUE = {"--resume": "last", "--cache": "ram"}
LISTS = ("--freeze", "--classes")  # options that take several numbers, as in YOLOv5


class Command(HelpCommand):
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


def _defaults() -> str:
    """Return a table of the defaults that depend on the task and the dataset, and one of detector families' defaults.

    `train --help` prints the first one.
    """
    tasks = {f"{task} {data}": preset for task in TASKS for data, preset in PRESETS[task].items()}
    families = {f"--cfg {family}": family_presets(family)[""] for family in named_families()}
    return f"{_table('default of', tasks)}\n\n{_table('default of', families)}"


def _table(title: str, presets: Mapping[str, Preset]) -> str:
    """Return a table of presets; names with the same defaults, such as cifar10 and cifar100, share a row."""
    names = ("epochs", "batch", "imgsz", "optimizer", "schedule")
    merged: dict[tuple[str, ...], str] = {}
    for name, preset in presets.items():
        key = (name.split()[0], *(str(getattr(preset, each)) for each in names))
        merged[key] = f"{merged[key]}, {name.split()[-1]}" if key in merged else name.rstrip()
    rows = [[title, *map(option_of, names)], *([name, *values] for (_, *values), name in merged.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)


app = typer.Typer(
    cls=HelpGroup,
    help="Train and use detectors, classifiers and segmentation models.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)
app.command(cls=Command, epilog=_defaults())(train)
for command in (val, predict, export, info, hyp):
    app.command(cls=Command)(command)
app.command(cls=Command, context_settings=TRAIN_OPTIONS)(verify)
app.command(cls=Command, context_settings=TRAIN_OPTIONS)(profile)
app.command(cls=HelpCommand, context_settings=ANY_WORDS)(yolo)
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")

__all__ = ["app"]
