"""Trains a detector under torchrun or alone: model, data, loss, metric and loop."""
