"""Converts checkpoints: of a run for transformers, of verl's fsdp2 engine for this one, quantised ones to bfloat16."""
