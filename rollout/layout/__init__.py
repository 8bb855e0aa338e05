"""Layouts of the trainer and of vLLM, and the transfers between the two."""
