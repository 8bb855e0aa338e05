"""Checkpoints of a run as Hugging Face models, and checkpoints of verl's fsdp2 engine as this engine's."""
