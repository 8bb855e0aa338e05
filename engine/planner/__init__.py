"""What a training step holds and moves on each rank, from sizes alone."""
