"""Hydra configuration: the ``engine`` group and the search-path plug-in that lets verl find it."""
