"""Predict the memory, step time and weight-sync time of a model on a cluster, and recommend settings."""
