"""Runnable recipes: the CPU quickstart and one per model and cluster shape."""
