"""Converts checkpoints: runs to Hugging Face models, verl's fsdp2 checkpoints to this engine's, quantised ones to bfloat16."""
