"""Evaluation, prediction and export of trained models."""
