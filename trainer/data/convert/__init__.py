"""Conversion of datasets to YOLO format."""
