"""vLLM's loaders know every exported name of families that its CPU build can't run, and fill each parameter."""

import importlib
import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from epfsdp2.engine.compat import versions
from epfsdp2.engine.moe.outside.families import prepare
from epfsdp2.rollout.vllm import names
from tests.parity.families import ALL
from tests.rollout.served.served_family import TORCHVISION
from tests.rollout.served_families import randomise, sent
from tests.support.ranks import run_ranks
from tests.support.rollout.vllm_engine import no_segments_are_left, segments_identity  # noqa: F401  (a fixture)

# vLLM reads these entries of published configs, which transformers' configs do not have.
_SPARSE = {"sparse_attention_freq": [1, 0, 1], "sparse_num_index_heads": 2, "sparse_index_dim": 12}
_SPARSE |= {"sparse_block_size": 4, "sparse_topk_blocks": 2, "sparse_local_block": 1, "sparse_init_block": 1}
_MINIMAX = {"hidden_act": "swigluoai", "moe_layer_freq": [0, 1, 1], "sparse_attention_config": _SPARSE}
_GLM = {"mhc": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "mla_use_nope": True}
_TOWER = {"img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2}}
PUBLISHED: dict[str, dict] = {
    "aria": {},
    "glm5_next": {"text_config": {**_GLM, "indexer_rope_interleave": True}},
    "hy_v4": {},
    "kimi_k25": {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"topk_method": "noaux_tc"}},
    "kimi_linear": {"mla_use_nope": True},
    "minimax_m3_vl": {"text_config": _MINIMAX, "vision_config": _TOWER},
}


def _load(family, folder):
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_DIST_IDENT=segments_identity(folder))
    sys.path += TORCHVISION.values()
    model = ALL[family].build()
    prepare(model)
    randomise(model, seed=1)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    config = json.loads((Path(folder) / "config.json").read_text())
    for name, value in PUBLISHED[family].items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (Path(folder) / "config.json").write_text(json.dumps(config))
    theirs = _built(folder, config["architectures"][0])
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.fill_(torch.nan)
    theirs.load_weights(names.for_vllm(model, sent(model, torch.bfloat16)))
    rows = model.config.get_text_config().vocab_size  # the others are padding
    held = {
        name: p[:rows] if "embed_tokens" in name or "lm_head" in name else p for name, p in theirs.named_parameters()
    }
    assert [name for name, parameter in held.items() if parameter.isnan().any()] == []


def _built(folder, architecture):
    """Return vLLM's model on a CPU, without the kernels that it lacks there."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends import cpu_attn

    backend = f"{cpu_attn.__name__}.CPUAttentionBackend"
    for owner, name, replaced in (
        (experts, "select_unquantized_moe_backend", lambda *a, **k: (UnquantizedMoeBackend.TRITON, None)),
        (CpuPlatform, "get_attn_backend_cls", classmethod(lambda *a, **k: backend)),
        (cpu_attn.CPUAttentionBackendImpl, "__init__", lambda *a, **k: None),
        (torch.cuda, "Event", mock.Mock),
        (torch.cuda, "Stream", mock.Mock),
        (importlib.import_module("vllm.models.kimi_k3.nvidia.model"), "maybe_init_gemm_rs_ar", lambda *a, **k: None),
    ):
        setattr(owner, name, replaced)
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
    settings = {"dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": True}
    engine = EngineArgs(folder, max_model_len=128, block_size=128, **settings).create_engine_config()
    with set_current_vllm_config(engine):
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        return initialize_model(engine)


@pytest.mark.skipif(not versions.vllm_in(">=0.32"), reason="vLLM before 0.32 does not have all of them")
@pytest.mark.parametrize("family", sorted(PUBLISHED.keys() & ALL.keys()))
def test_vllm_loads_each_parameter_from_exported_names_of(family, tmp_path):
    run_ranks(_load, 1, family, str(tmp_path), timeout=200)
