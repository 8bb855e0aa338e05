"""Multi-token prediction: layers that draft tokens after the next one, trained beside the policy."""
