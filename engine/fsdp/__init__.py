"""FSDP2 units, activation checkpointing, compilation, sequence parallelism."""
