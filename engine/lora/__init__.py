"""Low-rank adapters: settings, computation, merging, and peft files."""
