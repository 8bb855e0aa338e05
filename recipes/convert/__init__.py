"""Checkpoints of a run as Hugging Face models; those of verl's fsdp2 engine and quantised ones as this engine's."""
