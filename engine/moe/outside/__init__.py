"""Families outside transformers' experts interface, put onto it by one record and one forward each."""
