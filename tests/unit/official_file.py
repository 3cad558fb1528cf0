"""Writes a checkpoint as YOLOv5 or ultralytics does: a pickle of modules whose classes this process does not know.

Run as a program, as the classes' modules (models.yolo, models.common, ultralytics.nn...) must exist while it is
written, and only then.
"""

import sys
from pathlib import Path
from typing import Any

from tests.unit.trainer_process import run


def write_official(path: Path, **options: Any) -> Path:
    """A network in half precision; options: cfg, nc, seed, ema_seed, anchor_gain, names_as_dict, model_class, act.

    Of a network with anchors YOLOv5 writes the file, of another ultralytics.
    """
    arguments = [f"{k}={v!r}" for k, v in options.items()]
    done = run(path.parent, str(path), *arguments, program=[__file__])
    assert done.returncode == 0, done.stderr
    return path


def main() -> None:
    import ast
    import types

    import torch
    from torch import nn

    from trainer.models import blocks
    from trainer.models.yolo import build_yolo, load_cfg

    path, *rest = sys.argv[1:]
    options = {k: ast.literal_eval(v) for k, v in (argument.split("=", 1) for argument in rest)}
    nc = options.get("nc", 80)
    cfg = load_cfg(options.get("cfg", "yolov5n.yaml"))
    has_anchors = "anchors" in cfg
    model_class = options.get("model_class", "DetectionModel")
    if has_anchors:
        homes = dict.fromkeys(("Conv", "C3", "Bottleneck", "SPPF", "Concat"), "models.common")
        homes |= dict.fromkeys(("Detect", model_class), "models.yolo")
    else:
        names = [
            name for name, value in vars(blocks).items() if isinstance(value, type) and name != "Callable"
        ]
        homes = dict.fromkeys([*names, "DFL"], "ultralytics.nn.modules.block")
        homes |= dict.fromkeys(("Conv", "DWConv", "Concat"), "ultralytics.nn.modules.conv")
        homes |= {"Detect": "ultralytics.nn.modules.head", model_class: "ultralytics.nn.tasks"}
    classes = {}
    for name, home in homes.items():
        parts = home.split(".")
        for k in range(len(parts)):
            known = ".".join(parts[: k + 1])
            sys.modules.setdefault(known, types.ModuleType(known))
        classes[name] = type(name, (nn.Module,), {"__module__": home})
        setattr(sys.modules[home], name, classes[name])

    def foreign(module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Conv2d):  # theirs has no class for the first one
            module.__class__ = nn.Conv2d
        if not type(module).__module__.startswith("trainer."):
            for key, child in module._modules.items():
                module._modules[key] = foreign(child)
            return module
        name = type(module).__name__
        twin = classes[model_class if name == "Yolo" else "Detect" if name.startswith("Detect") else name]()
        twin._parameters = module._parameters
        twin._buffers = module._buffers
        twin._modules.update({key: foreign(child) for key, child in module._modules.items()})
        if hasattr(module, "add"):
            twin.add = module.add
        return twin

    def as_ultralytics(whole: Any, rows: Any, bins: int) -> None:
        """Add the attributes of ultralytics' modules, and the constant of its head."""
        for number, (row, layer) in enumerate(zip(rows, whole.model, strict=True)):
            sources = [s - number if s == number - 1 else s for s in row.sources]
            layer.f = sources if len(sources) > 1 else sources[0]
            layer.i = number
            if row.module == "Concat":
                layer.d = 1
        head = whole.model[-1]
        head.nc = nc
        head.reg_max = bins
        if head.reg_max > 1:
            head.dfl = classes["DFL"]()
            head.dfl.conv = nn.Conv2d(head.reg_max, 1, 1, bias=False).requires_grad_(False)
            head.dfl.conv.weight.data = torch.arange(head.reg_max).float().view(1, -1, 1, 1)
        whole.args = {"imgsz": options.get("imgsz", 640), "model": "yolo.yaml"}
        if act := options.get("act"):
            whole.model[0].act = getattr(nn, act)()

    def written(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = build_yolo(cfg, nc=nc)
        for key, value in model.state_dict().items():
            if key.endswith("running_mean"):
                value.uniform_(-0.1, 0.1)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.__class__ = nn.BatchNorm2d
        if has_anchors:
            model.detect.anchors *= options.get("anchor_gain", 1)
        strides = torch.tensor([8.0, 16.0, 32.0])
        bins = 0 if has_anchors else model.detect.bins
        whole: Any = foreign(model)
        whole.yaml = {**cfg, "nc": nc, "ch": 3}
        names = [f"class {k}" for k in range(nc)]
        whole.names = dict(enumerate(names)) if options.get("names_as_dict") else names
        whole.nc = nc
        whole.stride = strides
        whole.save = [4, 6, 10, 14, 17, 20, 23]
        whole.hyp = {"lr0": 0.01}
        whole.model[-1].stride = strides
        if not has_anchors:
            as_ultralytics(whole, model.rows, bins)
        return whole.half()

    content = {
        "epoch": -1,
        "best_fitness": None,
        "model": written(options.get("seed", 0)),
        "ema": written(options["ema_seed"]) if "ema_seed" in options else None,
        "updates": None,
        "optimizer": None,
        "wandb_id": None,
        "date": "2022-02-22T12:00:00",
    }
    torch.save(content, path)


if __name__ == "__main__":
    main()
