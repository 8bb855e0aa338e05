"""Classes of vLLM that its CPU build can't run: they know all exported names, and a reload fills each parameter."""

import os
import sys
from pathlib import Path

import pytest
import torch

from epfsdp2.engine.compat import versions
from epfsdp2.engine.moe.outside.families import prepare
from epfsdp2.rollout.layout.layout_check import named_layers, prefix_of, unpadded_shape
from epfsdp2.rollout.layout.slice_names import slice_name
from epfsdp2.rollout.vllm import names
from epfsdp2.rollout.vllm.layout import known_families
from tests.parity.families import ALL
from tests.rollout.served import gpu_classes
from tests.rollout.served.served_family import TORCHVISION
from tests.rollout.served_families import SERVED, publish_config, randomise, sent
from tests.support.ranks import run_ranks
from tests.support.rollout.vllm_engine import no_segments_are_left, segments_identity  # noqa: F401  (a fixture)

# vLLM reads these entries of published configs, which transformers' configs do not have. None stands for an entry that
# published configs do not have.
_SPARSE = {"sparse_attention_freq": [1, 0, 1], "sparse_num_index_heads": 2, "sparse_index_dim": 12}
_SPARSE |= {"sparse_block_size": 4, "sparse_topk_blocks": 2, "sparse_local_block": 1, "sparse_init_block": 1}
_MINIMAX = {"hidden_act": "swigluoai", "moe_layer_freq": [0, 1, 1], "sparse_attention_config": _SPARSE}
_GLM = {"mhc": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "mla_use_nope": True}
_TOWER = {"img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2}}
_OF_TEXT = ("head_dim", "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size")
_INKLING = {"local_layer_ids": [0, 2], "dense_mlp_idx": 1, "use_embed_norm": True, "use_sconv": True}
_INKLING |= {"use_gate_bias": True, "use_global_scale": True}
_SEES = {"decoder_dmodel": 48, "vision_encoder_type": "hmlp", "n_channels": 3, "use_vision_norm": True}
_HEARS = {"decoder_dmodel": 48, "dmel_min_value": 0.0, "dmel_max_value": 1.0, "use_audio_norm": True}
PUBLISHED: dict[str, dict] = {
    "aria": {},
    "deepseek_v4": SERVED["deepseek_v4"].published if "deepseek_v4" in SERVED else {},
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), {}),
    "glm5_next": {"text_config": {**_GLM, "indexer_rope_interleave": True}},
    "hy_v4": {},
    "inkling": {
        **dict.fromkeys(_OF_TEXT),
        **{"text_config": _INKLING, "vision_config": _SEES, "audio_config": {**_HEARS, "audio_mode": "dmel"}},
    },
    "kimi_k25": {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"topk_method": "noaux_tc"}},
    "kimi_linear": {"mla_use_nope": True},
    "minimax_m3_vl": {"text_config": _MINIMAX, "vision_config": _TOWER},
}
SIZES = {"inkling": {"vision_config": {"patch_size": 14, "n_layers": 4}}}


def _held(model):
    """Parameters, and tensors that vLLM derives from them and keeps as attributes."""
    kept = {f"{n}.{own}": t for n, m in model.named_modules() for own, t in vars(m).items() if torch.is_tensor(t)}
    return dict(model.named_parameters()) | kept


def _forget(model):
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not name.endswith("attn_sink"):  # DeepSeek-V4 pads with -inf
            parameter.fill_(torch.nan)


def _slices(model, values):
    """Yield the parameters of a worker as a trainer sends them."""
    for name, layer in named_layers(model):
        for own, parameter in layer._parameters.items():
            if f"{name}.{own}" in values:  # else another name of a parameter
                part = tuple(map(slice, unpadded_shape(layer, own, parameter)))
                yield slice_name(prefix_of(name) + own), values[f"{name}.{own}"][part]


def _reload(family, folder):
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_DIST_IDENT=segments_identity(folder))
    sys.path += TORCHVISION.values()
    model = SERVED[family].family.build() if family in SERVED else ALL[family].build(**SIZES.get(family, {}))
    prepare(model)
    (architecture,) = PUBLISHED[family].get("architectures", [type(model).__name__])
    model.config.architectures = [architecture]
    model.config.save_pretrained(folder)
    publish_config(Path(folder), PUBLISHED[family])

    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    from epfsdp2.rollout.vllm.reload import Reload

    gpu_classes.leave_out_kernels()
    gpu_classes.register(architecture)
    settings = {"dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": True}
    engine = EngineArgs(folder, max_model_len=128, block_size=128, **settings).create_engine_config()

    def weights(seed):
        randomise(model, seed)
        return list(names.for_vllm(model, sent(model, torch.bfloat16)))

    with set_current_vllm_config(engine), torch.no_grad():
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        theirs = initialize_model(engine)
        _forget(theirs)
        theirs.load_weights(weights(seed=1))
        wanted = {name: tensor.clone() for name, tensor in _held(theirs).items()}
        theirs.load_weights(weights(seed=2))
        process_weights_after_loading(theirs, engine.model_config, torch.device("cpu"))
        rows = model.config.get_text_config().vocab_size  # the others are padding
        ways = [weights(seed=1)]
        if model.config.model_type in known_families():
            ways.append(list(_slices(theirs, wanted)))
        for sent_weights in ways:
            _forget(theirs)
            reload = Reload([(theirs, engine.model_config)], engine.parallel_config, verify=True)
            reload.start()
            reload.load(sent_weights)
            reload.finish()
            found = _held(theirs)
            for name, values in wanted.items():
                part = slice(rows) if "embed_tokens" in name or "lm_head" in name else ...
                assert torch.equal(found[name][part], values[part]), name


@pytest.mark.skipif(not versions.vllm_in(">=0.32"), reason="vLLM before 0.32 does not have all of them")
@pytest.mark.parametrize("family", sorted(PUBLISHED.keys() & ALL.keys()))
def test_reload_of_exported_names_fills_each_parameter_of(family, tmp_path):
    run_ranks(_reload, 1, family, str(tmp_path), timeout=200)
