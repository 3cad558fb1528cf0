"""Datasets, augmentation, caches and dataloaders."""
