"""Which checkpoints of a run are complete, and what saves one when it is about to end: at SIGTERM, after a failure."""
