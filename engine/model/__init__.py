"""What is known of a Hugging Face model: how it is built without weights, its layers, its names in a checkpoint."""
