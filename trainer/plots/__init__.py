"""Pictures of a run; matplotlib is loaded only once a diagram is drawn."""

from trainer.plots import classify, detect, segment
from trainer.plots.boxes import class_colour, draw_batch, draw_boxes, draw_predictions, write_picture
from trainer.plots.labels import plot_labels
from trainer.plots.results import plot_results
from trainer.plots.scores import draw_metric, plot_confusion, plot_over_confidence, plot_precision_recall

# How each task's pictures are drawn: modules with labels(), batch(), shown() and metric().
DRAWINGS = {"detect": detect, "classify": classify, "segment": segment}

__all__ = [
    "DRAWINGS",
    "class_colour",
    "draw_batch",
    "draw_boxes",
    "draw_metric",
    "draw_predictions",
    "plot_confusion",
    "plot_labels",
    "plot_over_confidence",
    "plot_precision_recall",
    "plot_results",
    "write_picture",
]
