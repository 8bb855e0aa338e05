"""What knows vLLM: its layout and settings, the adapter beside a trainer rank, and what loads weights in a worker."""
