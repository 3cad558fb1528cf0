"""Checks of a node: `probe.sh` collects facts there, and pure functions judge them; also tests between nodes."""
