"""`trainer data`: checks, downloads and converts datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trainer.config import DIGITS
from trainer.config.faults import summary

if TYPE_CHECKING:
    from trainer.data.convert.writer import Conversion

data = typer.Typer(no_args_is_help=True, help="Check, download or convert a dataset.")

DataYaml = Annotated[str, typer.Option("--data", help="The path of a data.yaml.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Decode = Annotated[
    bool, typer.Option("--decode/--headers", help="Decode all images, or read their headers (faster).")
]


@data.command()
def check(data_yaml: DataYaml, decode: Decode = True, as_json: AsJson = False) -> None:
    """Print the faults of a dataset with file and line, and its classes.

    It checks the splits train and val. trainer train finds the same, except for images that are in both splits. The
    exit code is 2 if the dataset has a fault. Warnings, such as the same box twice or an image without a label file, do
    not change it.
    """
    from trainer.data.check import check as examine

    if data_yaml == DIGITS:
        raise typer.BadParameter(f"{data_yaml} is built in and needs no check", param_hint="--data")
    found, tables = examine(data_yaml, decode=decode)
    faults = [fault for fault in found if not fault.warning]
    warnings = [fault for fault in found if fault.warning]
    if as_json:
        keys = ("file", "line", "what", "hint")
        plain = [
            [{key: getattr(fault, key) for key in keys} for fault in part] for part in (faults, warnings)
        ]
        splits = {table["split"]: table for table in tables}
        content = {"data": data_yaml, "faults": plain[0], "warnings": plain[1], "splits": splits}
        typer.echo(json.dumps(content, indent=1))
    else:
        lines = [str(fault) for fault in faults] + [f"warning: {fault}" for fault in warnings]
        lines += [line for table in tables for line in _lines(table)]
        lines.append(summary(found))
        lines += [f"hint: {hint}" for hint in dict.fromkeys(fault.hint for fault in faults if fault.hint)]
        typer.echo("\n".join(lines))
    if faults:
        raise typer.Exit(2)


@data.command()
def download(data_yaml: DataYaml) -> None:
    """Download the archive that data.yaml names if images are missing.

    The archive, named under download, is unpacked. trainer train does the same. The archive is a .zip, .tar or .tar.gz;
    sha256 in data.yaml is checked. Nothing in the archive is executed.
    """
    from trainer.data.formats.fetch import fetch_missing
    from trainer.data.formats.yolo import read_split

    if not fetch_missing(data_yaml):
        for split in ("train", "val"):
            # Raises if images are missing and data.yaml has no `download`.
            read_split(data_yaml, split, decode=False)
        typer.echo(f"{data_yaml}: all images exist")


convert = typer.Typer(no_args_is_help=True, help="Convert a dataset to YOLO format.")
data.add_typer(convert, name="convert")

Out = Annotated[Path, typer.Option(help="Folder to create; it will contain data.yaml.", show_default=False)]
Copy = Annotated[bool, typer.Option("--copy", help="Copy the images instead of linking to them.")]
AllowBadLabels = Annotated[
    bool,
    typer.Option(
        "--allow-bad-labels", help="Skip and list invalid entries instead of stopping with an error."
    ),
]
ValShare = Annotated[
    float,
    typer.Option(help="Share of the images for validation, chosen by file name, if no split is defined."),
]


@convert.command()
def coco(
    annotations: Annotated[
        Path,
        typer.Argument(help="COCO annotations, for example instances_train2017.json.", show_default=False),
    ],
    images: Annotated[Path, typer.Option(help="Folder of the images.", show_default=False)],
    out: Out,
    val: Annotated[
        Path | None,
        typer.Option(help="Annotations of the validation images, for example instances_val2017.json."),
    ] = None,
    val_images: Annotated[
        Path | None, typer.Option(help="Folder of the validation images. [default: --images]")
    ] = None,
    val_share: Annotated[
        float | None,
        typer.Option(
            help="Without --val: share of the images for validation, chosen by file name. [default: 0.1]",
            show_default=False,
        ),
    ] = None,
    classes: Annotated[
        str,
        typer.Option(
            metavar="A,B,...",
            help="Convert only these categories, by name or id. [default: all]",
            show_default=False,
        ),
    ] = "",
    crowd: Annotated[
        Literal["omit", "boxes"], typer.Option(help="What to do with objects marked as crowds (iscrowd: 1).")
    ] = "omit",
    copy: Copy = False,
    allow_bad_labels: AllowBadLabels = False,
) -> None:
    """Convert COCO annotations: outlines become polygons, category ids become 0 to N-1

    Crowds are omitted, and so is a category without boxes that is only the parent of others.
    """
    from trainer.data.convert.coco import Choice, from_coco
    from trainer.data.convert.writer import check_out

    check_out(out)
    chosen = [name.strip() for name in classes.split(",") if name.strip()]
    choice = Choice(chosen, crowds=crowd == "boxes")
    found = from_coco(
        annotations, images, val_annotations=val, val_images=val_images, val_share=val_share, choice=choice
    )
    _write(found, out, copy=copy, allow_bad_labels=allow_bad_labels)


@convert.command()
def voc(
    folder: Annotated[
        Path, typer.Argument(help="Folder with Annotations and JPEGImages.", show_default=False)
    ],
    out: Out,
    skip_difficult: Annotated[
        bool, typer.Option("--skip-difficult", help="Omit objects marked as difficult.")
    ] = False,
    val_share: ValShare = 0.1,
    copy: Copy = False,
    allow_bad_labels: AllowBadLabels = False,
) -> None:
    """Convert Pascal VOC's XML files; the splits come from ImageSets/Main, if it defines them."""
    from trainer.data.convert.voc import from_voc
    from trainer.data.convert.writer import check_out

    check_out(out)
    found = from_voc(folder, skip_difficult=skip_difficult, val_share=val_share)
    _write(found, out, copy=copy, allow_bad_labels=allow_bad_labels)


def _write(found: Conversion, out: Path, *, copy: bool, allow_bad_labels: bool) -> None:
    from trainer.data.convert.writer import write

    try:
        write(found, out, copy=copy, allow_bad_labels=allow_bad_labels)
    finally:  # an error has only the first few faults
        for fault in found.faults:
            typer.echo(f"left out: {fault}" if out.exists() else str(fault))
    for what, count in found.notes.items():
        typer.echo(f"{what}: {count}")
    for split, items in found.splits.items():
        typer.echo(
            f"{split}: {_count(len(items), 'image')}, {_count(sum(len(i.rows) for i in items), 'box')}"
        )
    typer.echo(f"{_count(len(found.names), 'class')} -> {out / 'data.yaml'}")


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith(("x", "s")) else f"{noun}s"
    return f"{number or 'no'} {noun if number == 1 else plural}"


def _lines(table: dict[str, Any]) -> list[str]:
    width = max(5, *(len(row["name"]) for row in table["classes"]))
    images = f"{_count(table['images'], 'image')} ({table['background']} without boxes)"
    lines = [
        f"{table['split']}: {images}, {_count(table['boxes'], 'box')}",
        f"  {'class':<{width}}  images    boxes   share  median box, px",
    ]
    for row in table["classes"]:
        size = "{:.0f} x {:.0f}".format(*row["median_px"]) if row["boxes"] else "no boxes"
        counts = f"{row['images']:8}  {row['boxes']:7}  {row['share']:6.1%}"
        lines.append(f"  {row['name']:<{width}}  {counts}  {size}")
    return lines
