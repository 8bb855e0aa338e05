"""A run's difference between trainer and rollout, by cause."""
