"""Converts checkpoints: of a run to a Hugging Face model, of verl's fsdp2 engine to this one's, quantised to bfloat16."""
