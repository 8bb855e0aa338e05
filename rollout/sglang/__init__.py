"""What knows SGLang: the adapter beside a trainer rank, the loader inside a worker, and what they share."""
