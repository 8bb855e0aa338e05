"""Find experts modules, dispatch tokens to their experts, and compute them."""
