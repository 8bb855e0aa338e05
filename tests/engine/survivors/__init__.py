"""Tests of ``engine/survivors``."""
