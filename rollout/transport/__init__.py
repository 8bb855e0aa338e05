"""Moves tensors: all-gathers, exchanges, buckets and checksums."""
