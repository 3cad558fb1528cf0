"""`trainer info`: prints a detector's layers, parameters and FLOPs."""

import json
from typing import Annotated, Any

import typer

from trainer.errors import TrainerError

COCO = 80  # classes


def info(
    cfg: Annotated[
        str,
        typer.Option(
            help="Detector: a model file (yolov5n.yaml, s, m, l, x, or a path to your own), dfine-n, torchvision:MODEL."
        ),
    ] = "yolov5n.yaml",
    imgsz: Annotated[
        int, typer.Option("--imgsz", "--img", help="Side of the image in pixels, for the GFLOPs.")
    ] = 640,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print a detector's layers, parameters, GFLOPs and gradient bytes.

    The gradients are what ranks exchange in each step. GFLOPs count, for an image, the convolutions and matrix products
    of a forward pass; a multiply-add counts as two operations. Models that are not model files are counted with 80
    classes.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from trainer.config import Hyp
    from trainer.data.loading.detection_loader import check_imgsz
    from trainer.detectors import build, read_cfg
    from trainer.models.yolo import fuse

    def parameters(module: torch.nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    content = read_cfg(cfg)
    if "import" in content:
        raise TrainerError(
            f"--cfg {cfg}: a model of Python code has no layers to list",
            "use a model file, for example yolov5n.yaml",
        )
    nc = int(content.get("nc", COCO))
    parts = build(content, nc=nc, where=cfg, hyp=Hyp(), imgsz=imgsz)
    check_imgsz(imgsz, parts.stride)
    device = "cpu" if parts.reads_values else "meta"  # which computes shapes only
    model: Any = parts.model.to(device)
    named = getattr(model, "parts", None) or list(model.named_children())
    strides = model.detect.strides if hasattr(model, "detect") else [parts.stride]
    sources = [{"from": list(row.sources)} for row in getattr(model, "rows", ())] or [{}] * len(named)
    rows: list[dict[str, Any]] = [
        {"layer": n, **source, "module": name, "parameters": parameters(layer)}
        for n, ((name, layer), source) in enumerate(zip(named, sources, strict=True))
    ]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.empty(1, 3, imgsz, imgsz, device=device))
    flops = counter.get_total_flops()
    whole = parameters(model)
    cost = {"parameters": whole, "fused_parameters": parameters(fuse(model)), "flops": flops}
    cost["gradient_bytes"] = 4 * whole  # fp32
    if as_json:
        summary = {"cfg": cfg, "nc": nc, "strides": strides, "imgsz": imgsz}
        typer.echo(json.dumps({**summary, **cost, "layers": rows}))
        return
    for layer in rows:
        source = f"from {','.join(map(str, layer['from'])):<12} " if "from" in layer else ""
        typer.echo(f"{layer['layer']:>3}  {source}{layer['module']:<12} {layer['parameters']:>12,}")
    typer.echo(
        f"{len(rows)} layers, {whole:,} parameters ({cost['fused_parameters']:,} fused for inference), "
        f"{nc} classes, strides {strides}\n"
        f"{flops / 1e9:.2f} GFLOPs for an image of {imgsz} px, {4 * whole / 1e6:.1f} MB of gradients"
        " per step between ranks"
    )
