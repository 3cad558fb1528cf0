"""`trainer info`: what a model file describes, and what it costs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from trainer.errors import TrainerError


def info(
    cfg: Annotated[
        str, typer.Option(help="A detector's model file: yolov5n.yaml, s, m, l, x, or your own in that syntax.")
    ] = "yolov5n.yaml",
    imgsz: Annotated[int, typer.Option("--imgsz", "--img", help="Side of the pictures in pixels, for GFLOPs.")] = 640,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts.")] = False,
) -> None:
    """List a model file's layers with their parameters, and what a picture and a step cost.

    GFLOPs count the convolutions of a forward pass, a multiplication and its addition as two.
    """
    import torch

    from trainer.models.cost import cost, parameters
    from trainer.models.yolo import build_yolo, load_cfg

    content = load_cfg(cfg)
    if "import" in content:
        raise TrainerError(
            f"--cfg {cfg}: a model of Python code has no layers to list",
            "give a model file: yolov5n.yaml or your own in that syntax",
        )
    with torch.device("meta"):  # shapes are all that counts here
        model = build_yolo(content, nc=int(content["nc"]), where=cfg)
    largest = max(model.detect.strides)
    if imgsz < largest or imgsz % largest:
        near = max(largest, round(imgsz / largest) * largest)
        raise TrainerError(f"--imgsz {imgsz} is not a multiple of {largest}, {cfg}'s stride", f"use --imgsz {near}")
    rows: list[dict[str, Any]] = [
        {"layer": n, "from": list(row.sources), "module": row.module, "parameters": parameters(layer)}
        for n, (layer, row) in enumerate(zip(model.model, model.rows, strict=True))
    ]
    whole = cost(model, imgsz)
    if as_json:
        summary = {"cfg": cfg, "nc": model.detect.nc, "strides": model.detect.strides, "imgsz": imgsz}
        typer.echo(json.dumps({**summary, **asdict(whole), "layers": rows}))
        return
    for layer in rows:
        sources = ",".join(map(str, layer["from"]))
        typer.echo(f"{layer['layer']:>3}  from {sources:<12} {layer['module']:<12} {layer['parameters']:>12,}")
    typer.echo(
        f"{len(rows)} layers, {whole.parameters:,} parameters ({whole.fused_parameters:,} fused for inference), "
        f"{model.detect.nc} classes, strides {model.detect.strides}\n"
        f"{whole.flops / 1e9:.2f} GFLOPs for a picture of {imgsz} px, {whole.gradient_bytes / 1e6:.1f} MB of gradients"
        " per step between ranks"
    )
