"""The head of a language model: log-probs and entropy from hidden states, without the logits of all tokens at once."""
