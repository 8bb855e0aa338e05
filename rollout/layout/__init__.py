"""Layouts of the trainer and of a rollout, and the transfers between the two."""
