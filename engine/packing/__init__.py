"""Sequences that are packed into one row, and rows that ranks share."""
