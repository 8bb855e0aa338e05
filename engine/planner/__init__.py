"""The memory and traffic of a training step on each rank, predicted from sizes alone."""
