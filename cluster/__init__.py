"""Launcher: starts a job on several nodes, follows it, restarts it after failures, and stops it. Without torch."""

from cluster.api import Launched, launch

__all__ = ["Launched", "launch"]
