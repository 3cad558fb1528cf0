"""Settings for the tests: everything small, whatever is not named."""

from __future__ import annotations

from typing import Any

from trainer.config import Settings, preset_for

_SMALL: dict[str, Any] = {"cfg": "", "weights": "", "epochs": 2, "batch": 4, "imgsz": 64, "seed": 0, "val": True}
_SMALL |= {"device": "cpu", "optimizer": "SGD", "workers": 0, "schedule": "linear", "precision": "fp32"}
_SMALL |= {"project": "runs", "name": "train", "exist_ok": False}


def settings(data: str, task: str = "detect", **more: Any) -> Settings:
    """The settings of a small run; its hyper-parameters are the preset's where none are given."""
    values: dict[str, Any] = {"hyp": preset_for(data, task).hyp, **_SMALL, **more}
    return Settings(data=data, task=task, **values)
