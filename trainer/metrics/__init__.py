"""Metrics that can be merged over ranks."""

from trainer.metrics.box_map import BoxMAP, BoxScores
from trainer.metrics.curves import CONFIDENCES, RECALLS, BoxCurves

__all__ = ["CONFIDENCES", "RECALLS", "BoxCurves", "BoxMAP", "BoxScores"]
