"""What a worker keeps, what a rank has, and the transfers between the two: arithmetic alone."""
