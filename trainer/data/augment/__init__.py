"""Augmentation: which sources a training image shows, and its painting by OpenCV or on the device."""
