"""Weights: checkpoints, YOLOv5's files, downloads."""
