"""Tests of ``engine/survivors.py``."""
