"""`trainer data`: look at a data set, convert it, fetch it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.config import PRESETS, check_data_path

if TYPE_CHECKING:
    from trainer.data.check import SplitTable
    from trainer.data.faults import Fault

data = typer.Typer(no_args_is_help=True, help="Check, convert or fetch a data set.")

DataYaml = Annotated[str, typer.Option("--data", help="The path of a data.yaml.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead, for scripts.")]
Decode = Annotated[
    bool, typer.Option("--decode/--headers", help="Decode every picture, or read only their headers (quicker).")
]


@data.command()
def check(data_yaml: DataYaml, decode: Decode = True, as_json: AsJson = False) -> None:
    """Print every fault of both splits with file and line, and a table of classes; exit 2 if there is a fault.

    Warnings (the same box twice, one picture in both splits) do not stop a training, and not this command either.
    """
    from trainer.data.check import check as examine

    check_data_path(data_yaml)
    if data_yaml in PRESETS:
        raise typer.BadParameter(f"{data_yaml} is built in, there is nothing to check", param_hint="--data")
    report = examine(data_yaml, decode=decode)
    if as_json:
        content = {
            "data": data_yaml,
            "faults": [_plain(fault) for fault in report.faults],
            "warnings": [_plain(fault) for fault in report.warnings],
            "splits": {table.split: dataclasses.asdict(table) for table in report.tables},
        }
        typer.echo(json.dumps(content, indent=1))
    else:
        for fault in report.faults:
            typer.echo(str(fault))
        for fault in report.warnings:
            typer.echo(f"warning: {fault}")
        for table in report.tables:
            typer.echo("\n".join(_lines(table)))
        typer.echo(f"{_count(len(report.faults), 'fault')}, {_count(len(report.warnings), 'warning')}")
        for hint in dict.fromkeys(fault.hint for fault in report.faults if fault.hint):
            typer.echo(f"hint: {hint}")
    if report.faults:
        raise typer.Exit(2)


def _plain(fault: Fault) -> dict[str, str | int]:
    return {"file": fault.file, "line": fault.line, "what": fault.what, "hint": fault.hint}


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _lines(table: SplitTable) -> list[str]:
    width = max(5, *(len(row.name) for row in table.classes))
    lines = [
        f"{table.split}: {_count(table.pictures, 'picture')} ({table.background} without boxes), {table.boxes} boxes",
        f"  {'class':<{width}}  pictures    boxes   share  median box, px",
    ]
    for row in table.classes:
        size = "{:.0f} x {:.0f}".format(*row.median_px) if row.boxes else "no boxes"
        lines.append(f"  {row.name:<{width}}  {row.pictures:8}  {row.boxes:7}  {row.share:6.1%}  {size}")
    return lines
