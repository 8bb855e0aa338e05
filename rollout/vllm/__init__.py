"""Code that runs inside vLLM's workers and loads the received weights; only this package imports vLLM."""
