"""Check collectives, kernels, memory and disks of a cluster, and measure the rates that the plan needs."""
