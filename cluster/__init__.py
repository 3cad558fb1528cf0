"""Starts a job on several nodes, watches it meet and run, starts it again, and stops it: no torch here."""

from cluster.api import Launched, launch

__all__ = ["Launched", "launch"]
