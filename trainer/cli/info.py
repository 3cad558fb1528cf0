"""`trainer info`: what a model file describes."""

from __future__ import annotations

from typing import Annotated

import typer


def info(cfg: Annotated[str, typer.Option(help="Model file, as for `train`.")] = "yolov5n.yaml") -> None:
    """List a model file's layers with their parameters."""
    from trainer.models.yolo import build_yolo, load_cfg

    content = load_cfg(cfg)
    model = build_yolo(content, nc=int(content["nc"]), where=cfg)
    for number, (layer, row) in enumerate(zip(model.model, model.rows, strict=True)):
        count = sum(p.numel() for p in layer.parameters())
        sources = ",".join(map(str, row.sources))
        typer.echo(f"{number:>3}  from {sources:<10} {row.module:<12} {count:>12,}")
    total = sum(p.numel() for p in model.parameters())
    typer.echo(
        f"{len(model.model)} layers, {total:,} parameters, {model.detect.nc} classes, strides {model.detect.strides}"
    )
