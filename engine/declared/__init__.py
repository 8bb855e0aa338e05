"""Every setting of the engine, declared once, and what is derived from the list."""
