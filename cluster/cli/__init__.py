"""Command line of `clusterctl`: options and output, one file per group of commands."""
