"""Save a run that is about to end: at SIGTERM, and after a failure by the ranks that are left."""
