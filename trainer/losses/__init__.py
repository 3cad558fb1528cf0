"""Losses: a file each, made by a detector family's `build` or a task, with the interface in criterion.py."""
