"""What verl has no extension point for: one wrapper each, with a test that fails when upstream no longer needs it."""
