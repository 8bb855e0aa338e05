"""How tensors travel: gathers, exchanges, buckets, checksums."""
