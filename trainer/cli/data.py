"""`trainer data`: look at a data set, convert it, fetch it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.config import PRESETS, check_data_path

if TYPE_CHECKING:
    from trainer.data.check import SplitTable
    from trainer.data.convert import Conversion
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


@data.command()
def download(data_yaml: DataYaml) -> None:
    """Fetch and unpack the archive that data.yaml names as `download`, if its pictures are not there.

    `train` does the same. The archive is a .zip or .tar.gz; `sha256` in data.yaml is checked. Scripts are never run.
    """
    from trainer.data.fetch import fetch_missing
    from trainer.data.yolo import read_split

    check_data_path(data_yaml)
    if not fetch_missing(data_yaml):
        for split in ("train", "val"):
            read_split(data_yaml, split)  # says what is missing, if there is no `download`
        typer.echo(f"{data_yaml}: all pictures are there")


convert = typer.Typer(no_args_is_help=True, help="Rewrite a data set in YOLO format.")
data.add_typer(convert, name="convert")

Out = Annotated[Path, typer.Option(help="The folder to make; data.yaml will be in it.", show_default=False)]
Copy = Annotated[bool, typer.Option("--copy", help="Copy the pictures; else links to them are made.")]
AllowBadLabels = Annotated[bool, typer.Option("--allow-bad-labels", help="Leave out what is wrong, and list it.")]
ValShare = Annotated[
    float, typer.Option(help="Share of the pictures for validation, chosen by their names, where nothing else says it.")
]


@convert.command()
def coco(
    annotations: Annotated[Path, typer.Argument(help="instances_train2017.json or the like.", show_default=False)],
    images: Annotated[Path, typer.Option(help="The folder of its pictures.", show_default=False)],
    out: Out,
    val: Annotated[
        Path | None, typer.Option(help="Annotations of the validation pictures: instances_val2017.json.")
    ] = None,
    val_images: Annotated[Path | None, typer.Option(help="The folder of these, if it is another one.")] = None,
    val_share: Annotated[
        float | None,
        typer.Option(
            help="Without --val: share of the pictures for validation, chosen by their names. (default: 0.1)",
            show_default=False,
        ),
    ] = None,
    copy: Copy = False,
    allow_bad_labels: AllowBadLabels = False,
) -> None:
    """Convert COCO annotations: outlines become polygon rows, crowds are left out, category ids become 0, 1, ..."""
    from trainer.data.convert import from_coco
    from trainer.data.convert.writer import check_out

    check_out(out)
    found = from_coco(annotations, images, val_annotations=val, val_images=val_images, val_share=val_share)
    _write(found, out, copy=copy, allow_bad_labels=allow_bad_labels)


@convert.command()
def voc(
    folder: Annotated[Path, typer.Argument(help="Holds Annotations and JPEGImages.", show_default=False)],
    out: Out,
    skip_difficult: Annotated[bool, typer.Option("--skip-difficult", help="Leave out objects marked so.")] = False,
    val_share: ValShare = 0.1,
    copy: Copy = False,
    allow_bad_labels: AllowBadLabels = False,
) -> None:
    """Convert Pascal VOC's XML files; train and val are those of ImageSets/Main, where it names them."""
    from trainer.data.convert import from_voc
    from trainer.data.convert.writer import check_out

    check_out(out)
    found = from_voc(folder, skip_difficult=skip_difficult, val_share=val_share)
    _write(found, out, copy=copy, allow_bad_labels=allow_bad_labels)


def _write(found: Conversion, out: Path, *, copy: bool, allow_bad_labels: bool) -> None:
    from trainer.data.convert.writer import write

    try:
        write(found, out, copy=copy, allow_bad_labels=allow_bad_labels)
    finally:  # all of them, where an error names only the first few
        for fault in found.faults:
            typer.echo(f"left out: {fault}" if out.exists() else str(fault))
    for what, count in found.notes.items():
        typer.echo(f"{what}: {count}")
    for split, items in found.splits.items():
        typer.echo(f"{split}: {_count(len(items), 'picture')}, {_count(sum(len(i.rows) for i in items), 'box')}")
    typer.echo(f"{len(found.names)} classes -> {out / 'data.yaml'}")


def _plain(fault: Fault) -> dict[str, str | int]:
    return {"file": fault.file, "line": fault.line, "what": fault.what, "hint": fault.hint}


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("x") else f"{noun}s"
    return f"{number or 'no'} {noun if number == 1 else plural}"


def _lines(table: SplitTable) -> list[str]:
    width = max(5, *(len(row.name) for row in table.classes))
    pictures = f"{_count(table.pictures, 'picture')} ({table.background} without boxes)"
    lines = [
        f"{table.split}: {pictures}, {_count(table.boxes, 'box')}",
        f"  {'class':<{width}}  pictures    boxes   share  median box, px",
    ]
    for row in table.classes:
        size = "{:.0f} x {:.0f}".format(*row.median_px) if row.boxes else "no boxes"
        lines.append(f"  {row.name:<{width}}  {row.pictures:8}  {row.boxes:7}  {row.share:6.1%}  {size}")
    return lines
