"""The training of a model: its course, its state, and what it tells of itself."""
