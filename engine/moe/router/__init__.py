"""Routers: replay of earlier routing, auxiliary losses and metrics of the load."""
