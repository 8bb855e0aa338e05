"""What FSDP2 wraps and how, activation checkpointing, compilation, sequence parallelism."""
