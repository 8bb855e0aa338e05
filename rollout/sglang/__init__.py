"""Code specific to SGLang: its layout and settings, the adapter beside a trainer rank, the loader inside a worker."""
