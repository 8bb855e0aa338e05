"""Convert checkpoints: a run's to Hugging Face, verl's fsdp2 to this engine's, quantised ones to bfloat16."""
