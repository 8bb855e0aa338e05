"""Code specific to vLLM: its layout and settings, the adapter beside a trainer rank, the reload inside a worker."""
