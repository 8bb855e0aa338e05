"""Checks of a run's settings before a worker starts."""
