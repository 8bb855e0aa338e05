"""A model whose weights vLLM quantises in blocks of 128 x 128."""

__all__ = ["BLOCK", "SIZES"]

BLOCK = 128
# Blocks of these cross the borders of the trainer's shards: 96 or 192 rows of the hidden size on a rank.
SIZES = {
    "hidden_size": 384,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 4,
}
