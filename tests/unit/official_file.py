"""Writes a checkpoint as YOLOv5 does: a pickle of whole modules, of classes that this process does not know.

Run as a program, as the classes' modules (models.yolo, models.common) must exist while it is written, and only then.
"""

import sys
from pathlib import Path
from typing import Any

from tests.unit.trainer_process import run


def write_official(path: Path, **options: Any) -> Path:
    """A yolov5n in half precision; options: nc, seed, ema_seed, anchor_gain, names_as_dict, model_class."""
    arguments = [f"{k}={v!r}" for k, v in options.items()]
    done = run(path.parent, str(path), *arguments, program=[__file__])
    assert done.returncode == 0, done.stderr
    return path


def main() -> None:
    import ast
    import types

    import torch
    from torch import nn

    from trainer.models.yolo import build_yolo, load_cfg

    path, *rest = sys.argv[1:]
    options = {k: ast.literal_eval(v) for k, v in (argument.split("=", 1) for argument in rest)}
    nc = options.get("nc", 80)
    model_class = options.get("model_class", "DetectionModel")
    homes = dict.fromkeys(("Conv", "C3", "Bottleneck", "SPPF", "Concat"), "models.common")
    homes |= dict.fromkeys(("Detect", model_class), "models.yolo")
    sys.modules["models"] = types.ModuleType("models")
    classes = {}
    for name, home in homes.items():
        module = sys.modules.setdefault(home, types.ModuleType(home))
        classes[name] = type(name, (nn.Module,), {"__module__": home})
        setattr(module, name, classes[name])

    def foreign(module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Conv2d):  # theirs has no class for the first one
            module.__class__ = nn.Conv2d
        if not type(module).__module__.startswith("trainer."):
            for key, child in module._modules.items():
                module._modules[key] = foreign(child)
            return module
        name = type(module).__name__
        twin = classes[model_class if name == "Yolo" else name]()
        twin._parameters, twin._buffers = module._parameters, module._buffers
        twin._modules.update({key: foreign(child) for key, child in module._modules.items()})
        return twin

    def written(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        cfg = load_cfg("yolov5n.yaml")
        model = build_yolo(cfg, nc=nc)
        for key, value in model.state_dict().items():
            if key.endswith("running_mean"):
                value.uniform_(-0.1, 0.1)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.__class__ = nn.BatchNorm2d
        model.detect.anchors *= options.get("anchor_gain", 1)
        strides = torch.tensor([8.0, 16.0, 32.0])
        whole: Any = foreign(model)
        whole.yaml = {**cfg, "nc": nc, "ch": 3}
        names = [f"class {k}" for k in range(nc)]
        whole.names = dict(enumerate(names)) if options.get("names_as_dict") else names
        whole.nc, whole.stride, whole.save, whole.hyp = nc, strides, [4, 6, 10, 14, 17, 20, 23], {"lr0": 0.01}
        whole.model[-1].stride = strides
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
