"""verl's loader of weights that vLLM quantises to FP8, on a real vLLM model."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from verl.utils.kernel import fp8_kernel
from verl.utils.vllm import vllm_quant_utils
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.model_loader import get_model

from epfsdp2.engine.model import hf_names
from epfsdp2.rollout.transport.checksums import CHECKSUMS, checksum, with_checksums
from epfsdp2.rollout.vllm import names
from tests.support.models.names import send_stacks
from tests.support.ranks import run_ranks

BLOCK = [128, 128]
# As verl says it to vLLM (``vllm_async_server.py``).
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": BLOCK,
    "ignored_layers": [f"model.layers.{layer}.mlp.gate" for layer in range(2)],
}
pytestmark = pytest.mark.e2e


def _model(seed):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    more = {"vocab_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 128, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**sizes, **heads, **more, initializer_range=0.1)
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16).requires_grad_(False)


def _plain(model):
    return dict(hf_names.as_checkpoint(model, model.named_parameters()))


def _save_quantised(model, folder):
    """Save a checkpoint that is quantised already: the result that verl's loader should have."""
    tensors = {}
    for name, weight in _plain(model).items():
        if weight.dim() == 2 and not any(part in name for part in (".gate.", "embed_tokens", "lm_head")):
            values, scale = fp8_kernel.scaled_fp8_blockwise(weight, BLOCK)
            tensors |= {name: values, f"{name}_scale_inv": scale.squeeze(-1)}
        else:
            tensors[name] = weight.contiguous()
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def _bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def _synchronised(folder):
    """One vLLM model, loaded from a checkpoint that is quantised already, and then by verl's loader."""
    mock.patch.object(fp8_kernel, "_DISABLE_TRITON_FP8", True).start()
    first, second = _model(1), _model(2)
    path = _save_quantised(first, folder)
    # vLLM's CPU build packs layers that are not quantised, where verl's loader can't write; a GPU leaves them alone.
    mock.patch.object(layer_utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: None).start()
    vllm_quant_utils.apply_vllm_quant_patches()
    arguments = EngineArgs(path, dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64)
    config = arguments.create_engine_config()
    assert vllm_quant_utils.is_quantized_model(config)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, local_rank=0, backend="gloo")
        initialize_model_parallel(1)
        model = get_model(vllm_config=config)
        runner = SimpleNamespace(model=model, vllm_config=config)

        def load(*buckets):
            """Load buckets like verl's worker extension (``vllm_rollout/utils.py``)."""
            state = vllm_quant_utils.prepare_quanted_weights_for_loading(model)
            for bucket in buckets:
                vllm_quant_utils.load_quanted_weights(bucket, runner)
            vllm_quant_utils.process_quanted_weights_after_loading(model, state)
            return {name: int(checksum(param)) for name, param in model.named_parameters()}

        as_loaded = {name: int(checksum(param)) for name, param in model.named_parameters()}
        assert torch.float8_e4m3fn in {param.dtype for param in model.parameters()}
        changed = load(list(_plain(second).items()))
        assert [name for name in as_loaded if changed[name] == as_loaded[name] and "norm" not in name] == []
        plain = list(_plain(first).items())
        again = load(plain[:40], plain[40:])
        # The CPU build packs FP8 weights into their own shape. verl takes it for one that needs no packing again,
        # so here they stay as they were quantised.
        assert {name for name in as_loaded if again[name] != as_loaded[name]} == {
            name for name, param in model.named_parameters() if param.dtype == torch.float8_e4m3fn
        }
        for layer in range(2):
            name, quantised = f"model.layers.{layer}.", load_file(f"{path}/model.safetensors")
            experts = [quantised[f"{name}mlp.experts.{e}.down_proj.weight"] for e in range(8)]
            held = model.get_parameter(f"{name}mlp.experts.routed_experts.w2_weight")
            assert torch.equal(_bits(held), _bits(torch.stack(experts)))
            held = model.get_parameter(f"{name}self_attn.o_proj.weight")
            assert torch.equal(_bits(held), _bits(quantised[f"{name}self_attn.o_proj.weight"]))
        send_stacks()
        with pytest.raises(AssertionError, match="Only 2d input tensor is supported"):
            load(list(names.for_vllm(first, first.named_parameters())))
        with pytest.raises(ValueError, match=f"no module or parameter named '{CHECKSUMS}'"):
            load(list(with_checksums(pair for pair in plain)))


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's CPU build has FP8 kernels for processors with AMX alone"
)
def test_vllm_quantising_loader_of_verl_accepts_checkpoint_tensors_only(tmp_path):
    """``test_streams.py`` checks that ``WorkerWeights`` sends these to such a rollout."""
    run_ranks(_synchronised, 1, tmp_path)
