"""Formats of datasets on disk: what lies in the folders, and what is wrong with it."""
