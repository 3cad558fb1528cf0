"""Starts a job on several nodes, watches it meet and run, and stops it: no torch here."""
