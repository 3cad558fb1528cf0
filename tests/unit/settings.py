"""Settings for the tests: everything small, whatever is not named."""

from __future__ import annotations

from typing import Any

from trainer.config import Settings

_SMALL: dict[str, Any] = {
    "epochs": 2,
    "batch": 4,
    "imgsz": 64,
    "device": "cpu",
    "optimizer": "SGD",
    "workers": 0,
}
_SMALL |= {"schedule": "linear", "precision": "fp32"}


def settings(data: str, task: str = "detect", **more: Any) -> Settings:
    """The settings of a small run; its hyper-parameters are the preset's where none are given."""
    return Settings(data=data, task=task, **{**_SMALL, **more})
