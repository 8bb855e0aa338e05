"""Plans whether a model fits a cluster, with which settings, and what a step and a weight sync cost."""
