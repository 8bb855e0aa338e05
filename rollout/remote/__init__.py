"""Weights for rollout workers that are other processes."""
