"""Plans of a sync: which rank sends which bytes to which worker, round by round."""
