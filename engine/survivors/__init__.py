"""Save what the living ranks hold after a failure, without a collective (``recipes/resilient --save-on-failure``)."""
