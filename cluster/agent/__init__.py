"""What runs on a node: `agent.py` where the program is, and the shell scripts around it."""
