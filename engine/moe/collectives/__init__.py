"""Collectives that send rows between the ranks of the tokens and those of their experts."""
