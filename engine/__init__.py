"""What trains: meshes, expert dispatch, FSDP2 wrapping, loading, optimizers and the glue to verl."""
