"""Benchmarks for users: what more ranks, workers and modes bring on their own data and model."""
