"""What can be known to be wrong before a worker is started."""
