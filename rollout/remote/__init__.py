"""Weight sync to rollout workers in processes of their own."""
