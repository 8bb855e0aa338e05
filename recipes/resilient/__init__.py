"""A run that is started again from its last complete checkpoint, on what is left of the cluster."""
