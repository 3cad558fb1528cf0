"""What can be trained: a task is a model, its data, its loss and its metric."""

from __future__ import annotations

from collections.abc import Callable

from trainer.config import Settings
from trainer.tasks.task import Batches, Metric, Scores, Task


def _detect(settings: Settings) -> Task:
    from trainer.tasks.detection import Detection

    return Detection(settings)


def _classify(settings: Settings) -> Task:
    from trainer.tasks.classification import Classification

    return Classification(settings)


def _segment(settings: Settings) -> Task:
    from trainer.tasks.segmentation import Segmentation

    return Segmentation(settings)


OPEN: dict[str, Callable[[Settings], Task]] = {"detect": _detect, "classify": _classify, "segment": _segment}


def open_task(settings: Settings) -> Task:
    """The task that the settings name, its data opened and checked; TrainerError where that cannot be used."""
    return OPEN[settings.task](settings)


__all__ = ["OPEN", "Batches", "Metric", "Scores", "Task", "open_task"]
