"""Backend kubernetes: one pod per node."""
