"""A model whose weights vLLM holds in FP8 or INT8, and its checkpoints: by blocks of 128 x 128, or by rows."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.models.published import stored_values

__all__ = ["BLOCK", "COMPRESSED", "SIZES", "compressed", "save_compressed", "save_quantised"]

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


# ``quantization_config`` of a checkpoint of compressed-tensors with a scale for each row.
COMPRESSED = {
    kind: {
        "quant_method": "compressed-tensors",
        "format": f"{type_}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": type_, "strategy": "channel", "symmetric": True, "dynamic": False},
                "input_activations": {
                    "num_bits": 8,
                    "type": type_,
                    "strategy": "token",
                    "symmetric": True,
                    "dynamic": True,
                },
            }
        },
    }
    for kind, type_ in (("fp8", "float"), ("int8", "int"))
}


def compressed(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values, and scales in float32, that compressed-tensors makes of the rows of a weight in bfloat16."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    if weight.dim() > 2:
        values, scales = zip(*(compressed(one, kind) for one in weight), strict=True)
        return torch.stack(values), torch.stack(scales)
    args = QuantizationArgs(**COMPRESSED[kind]["config_groups"]["group_0"]["weights"])
    ends = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    scales, _ = calculate_qparams(*ends, args)
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    return quantize(weight, scales, None, args, dtype=dtype), scales.float()


def save_compressed(folder: Path, out: Path, kind: str) -> Path:
    """Write the checkpoint of ``folder`` to ``out`` as compressed-tensors stores it; return ``out``."""
    tensors = {}
    for name, weight in stored_values(folder).items():
        weight = weight.bfloat16()
        if weight.dim() == 2 and not any(part in name for part in (".gate.", "embed_tokens", "lm_head")):
            tensors[name], tensors[f"{name}_scale"] = compressed(weight, kind)
        else:
            tensors[name] = weight
    config = json.loads((folder / "config.json").read_text())
    out.mkdir()
    config |= {"quantization_config": COMPRESSED[kind], "dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def save_quantised(folder: Path, out: Path) -> Path:
    """Write the checkpoint of ``folder`` in FP8 to ``out``, as vLLM's own quantisation makes it; return ``out``.

    vLLM loads it as it does DeepSeek's. Embedding, head and routers stay in bfloat16.
    """
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    tensors = {}
    for name, weight in stored_values(folder).items():
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
