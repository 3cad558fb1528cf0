"""Process group, parallelism strategies, and processes of several ranks."""
