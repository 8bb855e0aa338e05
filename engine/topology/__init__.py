"""Ranks and meshes, and which part of a tensor each rank holds."""
