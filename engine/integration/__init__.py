"""verl's side of training: engines behind its interface, and shims where it has no extension point."""
