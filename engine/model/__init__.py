"""Facts of a Hugging Face model: its build without weights, its layers, its names in a checkpoint."""
