"""Dataloaders: the images of each step, made into batches in worker processes."""
