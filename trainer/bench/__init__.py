"""Benchmarks of ranks, workers and strategies on a user's data and model."""
