"""What knows SGLang: its layout and settings, the adapter beside a trainer rank, and the loader inside a worker."""
