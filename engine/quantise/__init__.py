"""Quantisation to a rollout's formats, bit for bit as vLLM's: FP8 by blocks, FP8 and INT8 by rows."""
