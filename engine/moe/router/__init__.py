"""What decides which experts a token takes: replay of earlier routing, auxiliary losses and metrics."""
