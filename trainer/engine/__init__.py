"""Training engine: the trainer, its loop, checkpoint resume, signals, watchdog, and output."""
