"""Tasks: each combines a model, its data, its loss and its metric."""

import pkgutil

from trainer.config import Settings
from trainer.metrics.scores import Scores
from trainer.tasks.base import Task

# Imported when needed: each has its own large dependencies.
TASKS = {
    "detect": "trainer.tasks.detection:Detection",
    "classify": "trainer.tasks.torchvision_tasks:Classification",
    "segment": "trainer.tasks.torchvision_tasks:Segmentation",
}


def open_task(settings: Settings) -> Task:
    """Return the task of the settings with its data opened and checked. Raise TrainerError for unusable data."""
    task: Task = pkgutil.resolve_name(TASKS[settings.task])(settings)
    return task


__all__ = ["Scores", "Task", "open_task"]
