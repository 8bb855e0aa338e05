"""Restarts a failed run from its last complete checkpoint, on the nodes of the cluster that are left."""
