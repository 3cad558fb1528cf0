"""`trainer info`: prints a model file's layers, parameters and FLOPs."""

import json
from typing import Annotated, Any

import typer

from trainer.errors import TrainerError


def info(
    cfg: Annotated[
        str, typer.Option(help="Model file of a detector: yolov5n.yaml, s, m, l, x, or a path to your own.")
    ] = "yolov5n.yaml",
    imgsz: Annotated[int, typer.Option("--imgsz", "--img", help="Side of the image in pixels, for the GFLOPs.")] = 640,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print a model file's layers with parameters, GFLOPs per image and bytes of gradients per step.

    GFLOPs count the convolutions of a forward pass; a multiply-add counts as two operations.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from trainer.data.detection_loader import check_imgsz
    from trainer.detectors import read_cfg
    from trainer.models.yolo import build_yolo, fuse

    def parameters(module: torch.nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    content = read_cfg(cfg)
    if "backbone" not in content:
        raise TrainerError(
            f"--cfg {cfg}: a model of Python code has no layers to list", "use a model file, for example yolov5n.yaml"
        )
    with torch.device("meta"):  # only shapes are needed
        model = build_yolo(content, nc=int(content["nc"]), where=cfg)
    check_imgsz(imgsz, max(model.detect.strides))
    rows: list[dict[str, Any]] = [
        {"layer": n, "from": list(row.sources), "module": row.module, "parameters": parameters(layer)}
        for n, (layer, row) in enumerate(zip(model.model, model.rows, strict=True))
    ]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.empty(1, 3, imgsz, imgsz, device="meta"))
    flops, whole = counter.get_total_flops(), parameters(model)
    cost = {"parameters": whole, "fused_parameters": parameters(fuse(model)), "flops": flops}
    cost["gradient_bytes"] = 4 * whole  # fp32
    if as_json:
        summary = {"cfg": cfg, "nc": model.detect.nc, "strides": model.detect.strides, "imgsz": imgsz}
        typer.echo(json.dumps({**summary, **cost, "layers": rows}))
        return
    for layer in rows:
        sources = ",".join(map(str, layer["from"]))
        typer.echo(f"{layer['layer']:>3}  from {sources:<12} {layer['module']:<12} {layer['parameters']:>12,}")
    typer.echo(
        f"{len(rows)} layers, {whole:,} parameters ({cost['fused_parameters']:,} fused for inference), "
        f"{model.detect.nc} classes, strides {model.detect.strides}\n"
        f"{flops / 1e9:.2f} GFLOPs for an image of {imgsz} px, {4 * whole / 1e6:.1f} MB of gradients"
        " per step between ranks"
    )
