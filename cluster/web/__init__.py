"""Pages about jobs. `page` writes the report of a job that has ended, which needs no server."""
