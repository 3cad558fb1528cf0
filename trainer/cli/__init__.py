"""Command line of the trainer: one module per command; torch is imported only when a command runs."""

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
from trainer.config.presets import FAMILY_PRESETS, PRESETS, TASKS
from trainer.config.settings import option_of

WITHOUT_VALUE = {"--resume": "last", "--cache": "ram"}  # the value of an option given without one, as in YOLOv5
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
    """Return the defaults that depend on the task and the dataset as a table."""
    names = ("epochs", "batch", "imgsz", "optimizer", "schedule")
    rows = [["default of", *(option_of(name) for name in names)]]
    yolo = {f"detect yolov5 {data}": preset for data, preset in PRESETS["detect"].items()}
    families = {f"detect {family}": presets[""] for family, presets in FAMILY_PRESETS.items()}
    others = {f"{task} {data}": preset for task in TASKS[1:] for data, preset in PRESETS[task].items()}
    merged: dict[tuple[str, ...], str] = {}  # cifar10 and cifar100 have the same defaults
    for title, preset in {**yolo, **families, **others}.items():
        key = (title.split()[0], *(str(getattr(preset, name)) for name in names))
        merged[key] = f"{merged[key]}, {title.split()[-1]}" if key in merged else title.rstrip()
    rows += [[title, *values] for (_, *values), title in merged.items()]
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
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")

__all__ = ["app"]
