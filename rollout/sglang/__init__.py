"""What knows SGLang: verl's adapter sends it full tensors; on a machine without a GPU that takes a shim."""
