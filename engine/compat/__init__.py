"""What differs between versions of the libraries."""
