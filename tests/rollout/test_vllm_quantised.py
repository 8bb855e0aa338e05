"""Weights on their way into a real vLLM that quantises them to FP8, through verl's own loader."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from verl.utils.kernel.fp8_kernel import scaled_fp8_blockwise

from epfsdp2.rollout import naming
from epfsdp2.rollout.checksums import with_checksums
from epfsdp2.rollout.sockets import WeightSyncError

BLOCK = [128, 128]
# As verl says it to vLLM (``vllm_async_server.py``).
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": BLOCK}
ENVIRONMENT = {"VERL_VLLM_FP8_QUANT_ENABLED": "1", "VERL_DISABLE_TRITON_FP8": "1"}
pytestmark = pytest.mark.e2e


def _model(seed):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    more = {"vocab_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 128, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**sizes, **heads, **more, initializer_range=0.1)
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16).requires_grad_(False)


def _plain(model):
    return dict(naming.as_checkpoint(model, model.named_parameters()))


def _save_quantised(model, folder, settings):
    """The checkpoint that vLLM reads as it is: what verl's loader should come to."""
    tensors = {}
    for name, weight in _plain(model).items():
        if weight.dim() == 2 and not any(part in name for part in (".gate.", "embed_tokens", "lm_head")):
            values, scale = scaled_fp8_blockwise(weight, BLOCK)
            tensors |= {name: values, f"{name}_scale_inv": scale.squeeze(-1)}
        else:
            tensors[name] = weight.contiguous()
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_verls_quantising_loader_takes_a_checkpoints_tensors_and_neither_stacks_nor_checksums(
    tmp_path, monkeypatch, start_engine
):
    """What ``WorkerStream`` sends such a rollout is held by ``test_streams.py``; here, that vLLM takes it and no other.

    verl quantises by its PyTorch twin of a Triton kernel. vLLM's CPU build packs the layers that are not quantised (the
    router), where verl's loader can't write to them; ``unpacked_extension.py`` leaves them as a GPU has them.
    """
    first, second = _model(1), _model(2)
    monkeypatch.setattr("verl.utils.kernel.fp8_kernel._DISABLE_TRITON_FP8", True)
    settings = FP8 | {"ignored_layers": [f"model.layers.{layer}.mlp.gate" for layer in range(2)]}
    path = _save_quantised(first, tmp_path, settings)
    engine = start_engine(
        path, extension="unpacked_extension.Unpacked", environment=ENVIRONMENT, dtype="bfloat16", quantization="fp8"
    )
    as_loaded = engine.generate()
    engine.sync(lambda rank: iter(_plain(second).items()))
    assert engine.generate() != as_loaded
    engine.sync(lambda rank: iter(_plain(first).items()))
    assert engine.generate() == as_loaded

    refused = {
        "stacks of experts": (lambda: iter(first.named_parameters()), "Only 2d input tensor is supported"),
        "checksums": (lambda: with_checksums(n_t for n_t in _plain(first).items()), "__epfsdp2_checksums__"),
    }
    for what, (weights, cause) in refused.items():
        with pytest.raises(WeightSyncError):
            engine.sync(lambda rank, weights=weights: weights())
        assert cause in engine.log(), what
