"""`trainer export`: exports a detector to ONNX or TorchScript."""

import dataclasses
import json as json_format
from typing import Annotated

import typer


def export(
    weights: Annotated[
        str,
        typer.Option(help="Weights of a detector: best.pt of a run, or any weights that `train` accepts."),
    ],
    format: Annotated[
        str, typer.Option(help="onnx (requires onnx, onnxruntime and onnxscript) or torchscript.")
    ] = "onnx",
    imgsz: Annotated[
        int | None,
        typer.Option("--imgsz", "--img", help="Side of the images in pixels. [default: as in training]"),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", "--batch-size", help="Images per batch.")] = 1,
    dynamic: Annotated[
        bool,
        typer.Option(
            "--dynamic", help="Export with dynamic batch size, height and width (DETR's: batch size)."
        ),
    ] = False,
    image: Annotated[
        str,
        typer.Option(help="Image for the comparison with the model. [default: one of the built-in dataset]"),
    ] = "",
    out: Annotated[str, typer.Option(help="File to write. [default: best.onnx next to best.pt]")] = "",
    cfg: Annotated[
        str,
        typer.Option(help="package.module:function that builds the model, for weights of your own model."),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Export a detector to ONNX or TorchScript.

    The file is written only if its outputs equal the model's. Input: `images` (batch, 3, height, width), RGB in
    0..1. Outputs: `boxes` (batch, n, 4), x1 y1 x2 y2 in pixels, and `scores` (batch, n, classes).
    """
    from trainer.inference.export import export as write

    done = write(weights, format, imgsz=imgsz, batch=batch, dynamic=dynamic, image=image, out=out, cfg=cfg)
    if json:
        typer.echo(json_format.dumps({**dataclasses.asdict(done), "path": str(done.path)}))
        return
    batch_size = "any batch size" if done.any_batch else str(done.shape[0])
    sides = (
        f"{batch_size}, any size" if done.any_size else f"{batch_size}, {'x'.join(map(str, done.shape[1:]))}"
    )
    sides = sides if done.any_batch else "x".join(map(str, done.shape))
    typer.echo(f"{done.path}: {done.classes} classes, {sides}, {done.path.stat().st_size / 1e6:.1f} MB")
    typer.echo(
        f"compared with the model on an image: boxes differ by at most {done.box_difference:.2g} px, "
        f"scores by {done.score_difference:.2g}"
    )
