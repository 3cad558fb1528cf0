"""Plots and images of a run; matplotlib is imported only when a plot is drawn."""

from trainer.plots import classify, detect, segment
from trainer.plots.charts import plot_confusion, plot_results
from trainer.plots.drawing import class_colour, draw_boxes, draw_class, write_image

# A module per task, each with labels(), batch(), shown() and metric().
DRAWINGS = {"detect": detect, "classify": classify, "segment": segment}

__all__ = [
    "DRAWINGS",
    "class_colour",
    "draw_boxes",
    "draw_class",
    "plot_confusion",
    "plot_results",
    "write_image",
]
