"""Checks on a cluster that collectives, kernels, memory and disks work there, and measures what the plan needs."""
