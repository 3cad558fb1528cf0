"""Scores of a model that can be gathered from many ranks."""

from trainer.metrics.box_map import BoxMAP, BoxScores

__all__ = ["BoxMAP", "BoxScores"]
