"""The layout that ``vllm/layout.py`` computes equals the one traced from vLLM's own loaders."""

import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from epfsdp2.engine.compat import versions
from epfsdp2.rollout.layout.specs import Heads, Rollout, TensorSpec
from epfsdp2.rollout.servers import target_slices
from epfsdp2.rollout.vllm import layout as vllm_layout
from epfsdp2.rollout.vllm.layout import known_families
from tests.rollout.families import DENSE, FAMILIES, SIZES, config_of, known, model_on_meta
from tests.rollout.served import gpu_classes
from tests.rollout.served_families import SERVED, publish_config
from tests.support.ranks import run_ranks
from tests.support.rollout.loader_trace import differing_layouts, held_tensors
from tests.support.rollout.vllm_engine import no_segments_are_left, segments_identity  # noqa: F401  (a fixture)

_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
# Replaced, because vLLM before 0.29 has none on a CPU; its projections are outside of it.
_LATENT_ATTENTION = "vllm.model_executor.models.deepseek_v2.MultiHeadLatentAttentionWrapper"


def _compare(folder, cases, data_parallel=(), tower="sharded", for_gpus=False):
    """Compare both layouts, first of tensor-parallel workers, then of data-parallel ones.

    A case has a family, changes of its config, and whether vLLM runs expert parallel.
    """
    os.environ.update(_ENVIRONMENT, VLLM_DIST_IDENT=segments_identity(folder))
    # Before vLLM is imported, which changes some of transformers' classes (Dots1Model).
    both = [*cases, *data_parallel]
    models = [model_on_meta(config_of(family, **sizes)) for family, sizes, _ in both]
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs

    from epfsdp2.rollout.vllm import reload_shims
    from tests.rollout.served import ungated_experts

    reload_shims.install()
    ungated_experts.allow()
    if for_gpus:
        gpu_classes.leave_out_kernels()
    rank, world = dist.get_rank(), dist.get_world_size()
    tp, dp, differing = world, 1, []
    for index, (model, (family, sizes, expert_parallel)) in enumerate(zip(models, both, strict=True)):
        if index == len(cases):
            tp, dp = 1, world
            destroy_model_parallel()
        environment = SERVED[family].environment
        os.environ.update(environment)
        sys.path += filter(None, [environment.get("PYTHONPATH")])
        overrides = SERVED[family].settings.get("hf_overrides", {})
        (architecture,) = overrides.get("architectures", [type(model).__name__])
        model.config.architectures = [architecture]
        gpu_classes.register(architecture, for_gpus)
        where = Path(folder) / f"{rank}-{index}"
        model.config.save_pretrained(where)
        publish_config(where, SERVED[family].published)
        engine = EngineArgs(
            model=str(where),
            dtype=SERVED[family].dtype,
            tensor_parallel_size=tp,
            data_parallel_size=dp,
            enable_expert_parallel=expert_parallel,
            skip_tokenizer_init=True,
            enforce_eager=True,
            mm_encoder_tp_mode="data" if tower == "whole" else "weights",
            limit_mm_per_prompt={"image": 0, "video": 0} if tower == "none" else {},
            distributed_executor_backend="external_launcher" if dp > 1 else "mp",
        ).create_engine_config()
        with (
            set_current_vllm_config(engine),
            mock.patch(_LATENT_ATTENTION, lambda *a, **k: torch.nn.Module()),
            mock.patch("torch.cuda.Event", mock.Mock),  # as vLLM's runner on CPUs does; DeepSeek-V4 makes one
        ):
            init_distributed_environment(world, rank, "env://", rank, "gloo")
            ensure_model_parallel_initialized(tp, 1)
            rollout, heads = Rollout(tp, dp, expert_parallel, tower), Heads.of(model.config)
            for found in differing_layouts(model, *_loader(engine), rollout, rank, heads):
                differing.append((family, sizes, expert_parallel, rank, *found))
        for name in environment:
            del os.environ[name]
    destroy_model_parallel()
    assert not differing, "\n".join(map(str, differing[:10]))


def _loader(engine):
    """The parameters and buffers of vLLM's model, and its loader."""
    from vllm.model_executor.model_loader.utils import initialize_model

    theirs = initialize_model(engine)
    return held_tensors(theirs), theirs.load_weights


def _edge(family: str) -> tuple:
    """A family with sizes that two workers do not divide: one key-value head, a tied head, nine whole experts."""
    other = {"num_key_value_heads": 1, "tie_word_embeddings": True}
    if family in DENSE:  # vLLM's Qwen3 has no bias at o_proj
        return family, {**other, "attention_bias": family == "llama"}, False
    if family == "dbrx":  # has sizes in configs of their own, and vLLM's class does not distribute experts
        attention = {**SIZES[family]["attn_config"], "kv_n_heads": 1}
        return family, {"attn_config": attention, "num_key_value_heads": 1}, False
    if family == "gpt_oss":  # vLLM's class refuses one key-value head and nine experts
        return family, {"tie_word_embeddings": True}, True
    if family == "deepseek_v4":  # has one key-value head, and vLLM's class refuses the others
        return family, {}, True
    if family == "mimo_v2_flash":  # vLLM's config has the key-value heads of both kinds of layers
        other = {}
    sizes = SERVED[family].family.sizes
    counts = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    experts = next(name for name in counts if name in sizes.get("text_config", sizes))
    return family, {**other, experts: 9}, True


def _plain(families, whole=False):
    # As in DeepSeek-V2-Lite, in Nemotron 3 Super and in MiMo-V2-Flash, whose values are narrower than its keys.
    others = {"deepseek_v2": {"q_lora_rank": None}, "nemotron_h": {"moe_latent_size": 64}}
    others["mimo_v2_flash"] = {"v_head_dim": 16, "swa_v_head_dim": 16}
    published = [(family, others[family], False) for family in families if family in others and not whole]
    return [*((family, {}, whole) for family in families), *published]


# A model with experts comes first, because vLLM makes their groups for the first model of a process.
_KNOWN = [family for family in FAMILIES if known(family)]
_SEEING = [family for family in _KNOWN if "vision_config" in SERVED[family].family.sizes]  # vLLM starts them slowly
_BLIND = [family for family in _KNOWN if family not in _SEEING]
# Families with rules of their own for heads or experts, and one with the common rules.
_EDGES = {"qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "dbrx", "gemma4", "minimax_m2", "qwen3_next", "llama"}


def test_vllm_layout_of_every_family_on_two_workers_equals_the_traced_one(tmp_path):
    cases = _plain(_BLIND) + [_edge(family) for family in _BLIND if family in _EDGES]
    # vLLM shards experts over data-parallel workers too, and nothing else.
    data_parallel = _plain([family for family in ("qwen3_moe", "deepseek_v3", "gpt_oss") if known(family)])
    run_ranks(_compare, 2, str(tmp_path), cases, data_parallel, timeout=600)


@pytest.mark.long
def test_vllm_layout_of_every_family_with_sizes_that_workers_do_not_divide_equals_the_traced_one(tmp_path):
    run_ranks(_compare, 2, str(tmp_path), [_edge(family) for family in _BLIND], timeout=600)


@pytest.mark.long
@pytest.mark.parametrize("tower", ["sharded", "whole", "none"])
def test_vllm_layout_of_a_model_with_a_vision_tower_equals_the_traced_one(tmp_path, tower):
    edges = [_edge(family) for family in _SEEING if tower == "sharded"]
    run_ranks(_compare, 2, str(tmp_path), _plain(_SEEING) + edges, (), tower, timeout=600)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 4])
def test_vllm_layout_of_every_family_on_one_worker_and_on_four_equals_the_traced_one(tmp_path, world):
    spread = [family for family in _KNOWN if family not in (*DENSE, "dbrx") and world > 1]
    cases = [(family, {}, False) for family in _KNOWN] + [(family, {}, True) for family in spread]
    run_ranks(_compare, world, str(tmp_path), cases, timeout=600)


@pytest.mark.skipif(not known("deepseek_v4"), reason="this vLLM has no DeepSeek-V4")
def test_vllm_layout_of_deepseek_v4_for_gpus_equals_the_traced_one(tmp_path):
    cases = [
        (family, {}, whole) for family in ("deepseek_v4", "deepseek_v32", "glm_moe_dsa") for whole in (False, True)
    ]
    run_ranks(_compare, 2, str(tmp_path), cases, (), "sharded", True, timeout=600)


def test_vllm_layout_cases_hold_every_known_family():
    known = (known_families() | vllm_layout._RELEASES.keys()) & CONFIG_MAPPING_NAMES.keys()  # transformers has them
    assert {config_of(family).model_type for family in FAMILIES} == known


@pytest.mark.parametrize(
    ("family", "name", "release", "parameter", "first"),
    [
        ("dots1", "self_attn.k_proj", "0.24.0", "self_attn.k_proj", 8),
        ("solar_open", "mlp.shared_experts.up_proj", "0.24.0", "mlp.shared_experts.up_proj", 0),
        ("solar_open", "mlp.shared_experts.up_proj", None, "mlp.shared_experts.gate_up_proj", 8),
    ],
)
def test_vllm_layout_of_transformers_code_is_that_of_the_release(monkeypatch, family, name, release, parameter, first):
    monkeypatch.setattr(versions, "installed", lambda distribution: release)
    monkeypatch.setattr(vllm_layout, "_families", vllm_layout._families.__wrapped__)
    tensor = TensorSpec(f"model.layers.1.{name}.weight", (16, 32), 2)
    (part,) = target_slices(tensor, Rollout(2), 1, Heads(4, 2, 8, family))
    assert (part.parameter, part.block.low[0]) == (f"model.layers.1.{parameter}.weight", first)
