"""Recipes for GPU clusters: lists of overrides of verl's command."""
