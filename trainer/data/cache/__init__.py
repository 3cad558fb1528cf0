"""Decoded training images that are kept: in memory, on disk or on the device."""
