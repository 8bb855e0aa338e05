"""Ranks, meshes and slices: who holds which part of a tensor."""
