"""Families outside transformers' experts interface, brought onto it: one record and one forward each."""
