"""Hugging Face checkpoints in and out, and the state of a run."""
