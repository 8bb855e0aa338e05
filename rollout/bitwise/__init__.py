"""Operators that trainer and vLLM share, so that both compute the same bits (``engine.rollout_bitwise``)."""
