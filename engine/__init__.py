"""Training: meshes, expert dispatch, FSDP2 wrapping, loading, optimizers and the engines behind verl's interface."""
