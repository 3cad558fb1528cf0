"""Strategies of --parallel: how the ranks share the work of a step. One file each; config/strategies.py lists them."""
