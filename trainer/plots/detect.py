"""The pictures of a detector's training."""

from trainer.plots.boxes import draw_batch as batch
from trainer.plots.boxes import draw_predictions as shown
from trainer.plots.labels import plot_labels as labels
from trainer.plots.scores import draw_metric as metric

__all__ = ["batch", "labels", "metric", "shown"]
