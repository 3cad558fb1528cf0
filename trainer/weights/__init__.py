"""Weights in and out: checkpoints, YOLOv5's files, downloads."""
