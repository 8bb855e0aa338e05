"""Low-rank adapters: what is adapted, how it is computed, merged and saved."""
