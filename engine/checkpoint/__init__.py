"""Load and export Hugging Face checkpoints; save and resume the state of a run."""
