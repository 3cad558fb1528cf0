"""Detector families: the names with which --cfg begins, and the module of each. A family is a file and a line here."""

import re
from typing import Any

ModelCfg = dict[str, Any]  # a detector's description: {family: model}, or the content of a model file
# A family's name (torchvision:MODEL, dfine-SIZE), and the module with its function `build`, which is imported when
# needed. The family without a name has model files. The defaults of a family's options may be in presets.py.
FAMILIES = {
    "": "trainer.detectors.yolo",
    "torchvision": "trainer.detectors.torchvision_nets",
    "dfine": "trainer.detectors.dfine",
    "rtdetrv2": "trainer.detectors.rtdetrv2",
    "detr": "trainer.detectors.detr",
}


def named_families() -> list[str]:
    """Return the families that --cfg can name."""
    return [name for name in FAMILIES if name]


def family_of(cfg: str) -> tuple[str, str]:
    """Return the family and the model that --cfg names, such as ("dfine", "n"); ("", cfg) for a model file."""
    if cfg.endswith((".yaml", ".yml")):
        return "", cfg
    family, _, model = re.sub("[:-]", " ", cfg, count=1).partition(" ")
    return (family, model) if family in FAMILIES else ("", cfg)
