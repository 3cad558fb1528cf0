"""The networks that can be trained; a new one is a file here and a line in its task."""
