"""Fused kernels for what a layer computes outside of its experts, in place of modules shown to compute the same."""
