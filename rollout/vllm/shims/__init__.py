"""What vLLM has no setting for: its CPU build, and defects of its reload."""
