"""A model whose weights vLLM quantises in blocks of 128 x 128, and its checkpoint in FP8."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

__all__ = ["BLOCK", "SIZES", "save_quantised"]

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


def save_quantised(folder: Path, out: Path) -> Path:
    """Write the checkpoint of ``folder`` in FP8 to ``out``, as vLLM's own quantisation makes it; return ``out``.

    vLLM loads it as it does DeepSeek's. Embedding, head and routers stay in bfloat16.
    """
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        weight = weight.bfloat16()
        if weight.dim() == 2 and not any(part in name for part in (".gate.", "embed_tokens", "lm_head")):
            tensors[name], scales = per_block_cast_to_fp8(weight, [BLOCK, BLOCK], use_ue8m0=False)
            tensors[f"{name}_scale_inv"] = scales
        else:
            tensors[name] = weight
    config = json.loads((folder / "config.json").read_text())
    quantised = {  # as verl says it to vLLM (``vllm_async_server.py``)
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "ignored_layers": [f"model.layers.{layer}.mlp.gate" for layer in range(config["num_hidden_layers"])],
    }
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": quantised, "dtype": "bfloat16"}))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
