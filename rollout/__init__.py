"""How weights reach vLLM: names, streams, the vLLM worker extension and its checks."""
