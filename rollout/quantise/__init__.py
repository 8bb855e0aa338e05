"""Quantises weights on the trainer's ranks as vLLM does when it loads them, for workers in FP8 or INT8."""
