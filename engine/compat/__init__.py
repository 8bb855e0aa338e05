"""Private and version-dependent names of the libraries."""
