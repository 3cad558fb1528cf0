"""Training with Ultralytics' own package on several machines: `trainer yolo` (docs/how-to/from-ultralytics.md).

The package is neither a dependency nor in the container image; only `package` and what it calls import it.
"""
