"""Formats in which a rollout holds weights: FP8 by blocks, FP8 and INT8 by rows, bit for bit as vLLM makes them."""
