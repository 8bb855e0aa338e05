"""Recipes for GPU clusters: overrides of one command, and nothing else."""
