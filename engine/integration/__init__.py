"""All that knows verl: engines behind its interface, a platform plug-in, and shims for what it has no setting for."""
