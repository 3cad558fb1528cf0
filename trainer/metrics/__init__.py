"""Scores of a model that can be gathered from many ranks."""

from trainer.metrics.box_map import BoxMAP, BoxScores, ClassScores
from trainer.metrics.curves import CONFIDENCES, RECALLS, BoxCurves

__all__ = ["CONFIDENCES", "RECALLS", "BoxCurves", "BoxMAP", "BoxScores", "ClassScores"]
