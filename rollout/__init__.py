"""Sends the trainer's weights to a rollout: plans the slices of each worker, transfers and verifies them.

``docs/tour.md`` follows a sync through the files.
"""
