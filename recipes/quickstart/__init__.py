"""Runs GRPO on a tiny Mixture-of-Experts, offline, on one machine without a GPU."""
