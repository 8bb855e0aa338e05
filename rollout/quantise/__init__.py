"""Quantises weights on the trainer's ranks as vLLM does when it loads them, for workers that hold them in FP8."""
