"""The grouped GEMMs of the experts, in torch and in Triton."""
