"""Runnable recipes: convert checkpoints (a run's, verl's fsdp2, quantised ones), and predict a weight sync."""
