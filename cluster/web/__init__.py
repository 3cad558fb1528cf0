"""The pages of `clusterctl serve`: all jobs, one job, and the log of a node, live in a browser."""
