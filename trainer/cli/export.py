"""`trainer export`: a trained detector as a file for other programs."""

from __future__ import annotations

import dataclasses
import json as json_format
from typing import Annotated

import typer

from trainer.cli.val import Cfg


def export(
    weights: Annotated[str, typer.Option(help="A checkpoint: best.pt of a run, or anything that `train` takes.")],
    format: Annotated[str, typer.Option(help="onnx (needs onnx, onnxruntime and onnxscript) or torchscript.")] = "onnx",
    imgsz: Annotated[
        int | None, typer.Option("--imgsz", "--img", help="Side of the pictures in pixels. (default: the training's)")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", "--batch-size", help="Pictures at a time.")] = 1,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Leave the number and the sides of the pictures open.")] = (
        False
    ),
    picture: Annotated[str, typer.Option(help="Picture to compare on. (default: one of the built-in data set)")] = "",
    out: Annotated[str, typer.Option(help="File to write. (default: best.onnx beside best.pt)")] = "",
    cfg: Cfg = "",
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Export a detector to ONNX or TorchScript.

    The file is kept only after it has been run and its outputs compared with the model's. Input `images` (batch, 3,
    height, width), RGB in 0..1; outputs `boxes` (batch, n, 4) x1 y1 x2 y2 in pixels and `scores` (batch, n, classes).
    """
    from trainer.inference.export import export as write

    done = write(weights, format, imgsz=imgsz, batch=batch, dynamic=dynamic, picture=picture, out=out, cfg=cfg)
    if json:
        typer.echo(json_format.dumps({**dataclasses.asdict(done), "path": str(done.path)}))
        return
    sides = "any size" if dynamic else "x".join(map(str, done.shape))
    typer.echo(f"{done.path}: {done.classes} classes, {sides}, {done.path.stat().st_size / 1e6:.1f} MB")
    typer.echo(
        f"compared with the model on a picture: boxes differ by at most {done.box_difference:.2g} px, "
        f"scores by {done.score_difference:.2g}"
    )
