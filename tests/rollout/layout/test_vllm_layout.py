"""The layout that ``vllm/layout.py`` computes equals the one traced from vLLM's own loaders."""

import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.compat import versions
from epfsdp2.engine.topology.index_ranges import IndexRange
from epfsdp2.rollout.layout.specs import Heads, Rollout, TargetSlice, TensorSpec
from epfsdp2.rollout.servers import target_slices
from epfsdp2.rollout.vllm import layout as vllm_layout
from epfsdp2.rollout.vllm.layout import known_families
from tests.rollout.families import DENSE, FAMILIES, config_of, known, model_on_meta
from tests.rollout.served_families import SERVED
from tests.support.ranks import run_ranks
from tests.support.rollout.loader_trace import LoaderTracer, View, differing_layouts, merge_slices
from tests.support.rollout.vllm_engine import no_segments_are_left, segments_identity  # noqa: F401  (a fixture)

_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


# Before 0.29 vLLM has none on a CPU, and its projections are outside of it.
_LATENT_ATTENTION = "vllm.model_executor.models.deepseek_v2.MultiHeadLatentAttentionWrapper"


class _NoAttention(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()


def _compare(folder, cases, is_data_parallel=False, tower="sharded"):
    """Compare both layouts; a case is a family, changes of its config, and whether vLLM runs expert parallel."""
    os.environ.update(_ENVIRONMENT, VLLM_DIST_IDENT=segments_identity(folder))
    # Before vLLM is imported, which changes some of transformers' classes (Dots1Model).
    models = [model_on_meta(config_of(family, **sizes)) for family, sizes, _ in cases]
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry

    from epfsdp2.rollout.vllm import reload_shims
    from tests.rollout.served import ungated_experts

    reload_shims.install()
    ungated_experts.allow()
    rank, world = dist.get_rank(), dist.get_world_size()
    tp, dp = (1, world) if is_data_parallel else (world, 1)
    differing = []
    for index, (model, (family, sizes, expert_parallel)) in enumerate(zip(models, cases, strict=True)):
        environment = SERVED[family].environment
        os.environ.update(environment)
        sys.path += filter(None, [environment.get("PYTHONPATH")])
        overrides = SERVED[family].settings.get("hf_overrides", {})
        (architecture,) = overrides.get("architectures", [type(model).__name__])
        model.config.architectures = [architecture]
        # vLLM inspects a class that it has not imported in a process of its own, which takes seconds to start.
        if architecture in ModelRegistry.models:
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
        where = Path(folder) / f"{rank}-{index}"
        model.config.save_pretrained(where)
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
            # vLLM takes the ranks of this launcher as they are.
            distributed_executor_backend="external_launcher" if is_data_parallel else "mp",
        ).create_engine_config()
        with set_current_vllm_config(engine), mock.patch(_LATENT_ATTENTION, _NoAttention):
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
    """The parameters and buffers of vLLM's model, and what loads them."""
    from vllm.model_executor.model_loader.utils import initialize_model

    theirs = initialize_model(engine)
    held = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    return {name.replace(".routed_experts", ""): tensor for name, tensor in held.items()}, theirs.load_weights


def _cases(family: str) -> list:
    """A family as it is; and with one key-value head, a tied head and whole experts, which workers do not divide."""
    other = {"num_key_value_heads": 1, "tie_word_embeddings": True}
    if family in DENSE:  # vLLM's Qwen3 has no bias at o_proj
        return [(family, {}, False), (family, {**other, "attention_bias": family == "llama"}, False)]
    if family == "dbrx":  # its sizes are in configs of their own, and vLLM's class spreads no experts over workers
        few = {"attn_config": {**FAMILIES[family].sizes["attn_config"], "kv_n_heads": 1}, "num_key_value_heads": 1}
        return [(family, {}, False), (family, few, False)]
    counts = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    sizes = SERVED[family].family.sizes
    experts = next(name for name in counts if name in sizes.get("text_config", sizes))
    if family == "gpt_oss":  # vLLM's class takes neither
        return [(family, {}, False), (family, {"tie_word_embeddings": True}, True)]
    # As in DeepSeek-V2-Lite and in Nemotron 3 Super.
    others = {"deepseek_v2": {"q_lora_rank": None}, "nemotron_h": {"moe_latent_size": 64}}
    return [
        (family, {}, False),
        (family, {**other, experts: 9}, True),
        *([(family, others[family], False)] if family in others else []),
    ]


# In this order: one with experts has to come first, as vLLM makes their groups for the first model of a process.
_KNOWN = [family for family in FAMILIES if known(family)]
_SEEING = [family for family in _KNOWN if "vision_config" in SERVED[family].family.sizes]  # vLLM starts them slowly


def test_vllm_layout_of_every_family_on_two_workers_equals_the_traced_one(tmp_path):
    cases = [case for family in _KNOWN if family not in _SEEING for case in _cases(family)]
    run_ranks(_compare, 2, str(tmp_path), cases, timeout=600)


def test_vllm_layout_of_data_parallel_workers_equals_the_traced_one(tmp_path):
    """vLLM cuts experts over data-parallel workers too, and nothing else."""
    cases = [(name, {}, False) for name in ("qwen3_moe", "deepseek_v3", "gpt_oss") if known(name)]
    run_ranks(_compare, 2, str(tmp_path), cases, True)


@pytest.mark.long
@pytest.mark.parametrize("tower", ["sharded", "whole", "none"])
def test_vllm_layout_of_a_model_with_a_vision_tower_equals_the_traced_one(tmp_path, tower):
    cases = [case for family in _SEEING for case in (_cases(family) if tower == "sharded" else [(family, {}, False)])]
    run_ranks(_compare, 2, str(tmp_path), cases, False, tower, timeout=600)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 4])
def test_vllm_layout_of_every_family_on_one_worker_and_on_four_equals_the_traced_one(tmp_path, world):
    modes = [(family, whole) for family in _KNOWN for whole in (False, world > 1)]
    cases = [(family, {}, whole) for family, whole in modes if not (whole and family in (*DENSE, "dbrx"))]
    run_ranks(_compare, world, str(tmp_path), cases, timeout=600)


def test_vllm_layout_cases_hold_every_known_family():
    assert {config_of(family).model_type for family in FAMILIES} == known_families() | vllm_layout._RELEASES.keys()


@pytest.mark.parametrize(
    ("family", "name", "release", "parameter", "first"),
    [
        ("dots1", "self_attn.k_proj", "0.24.0", "self_attn.k_proj", 8),
        ("dots1", "self_attn.k_proj", "0.27.1", "self_attn.qkv_proj", 8),
        ("solar_open", "mlp.shared_experts.up_proj", "0.24.0", "mlp.shared_experts.up_proj", 0),
        ("solar_open", "mlp.shared_experts.up_proj", "0.27.1", "mlp.shared_experts.gate_up_proj", 8),
        ("solar_open", "mlp.shared_experts.up_proj", None, "mlp.shared_experts.gate_up_proj", 8),
    ],
)
def test_vllm_layout_of_transformers_code_is_that_of_the_release(monkeypatch, family, name, release, parameter, first):
    monkeypatch.setattr(versions, "installed", lambda distribution: release)
    monkeypatch.setattr(vllm_layout, "_families", vllm_layout._families.__wrapped__)
    tensor = TensorSpec(f"model.layers.1.{name}.weight", (16, 32), 2)
    (part,) = target_slices(tensor, Rollout(2), 1, Heads(4, 2, 8, family))
    assert (part.parameter, part.block.low[0]) == (f"model.layers.1.{parameter}.weight", first)


def _traced(view, place, shape=(6, 4), parameter=(6, 4)):
    """Trace a loader that copies ``view`` of a tensor to ``place`` in a parameter."""
    target = torch.zeros(parameter)
    strides = torch.empty(shape, device="meta").stride()
    with LoaderTracer([View("a", "t", shape, shape, strides, 0)], {"p": target}) as tracer:
        ((_, tensor),) = tracer.weights()
        place(target.data).copy_(view(tensor))
    assert not target.any()
    return tracer.slices()


def test_loader_tracer_follows_views_of_views():
    block = IndexRange((3, 1), (5, 3))
    assert _traced(lambda t: t.chunk(2)[1][:2].narrow(1, 1, 2), lambda p: p[1:3, 2:]) == {
        "t": [TargetSlice(block, "p", (1, 2))]
    }


def test_merge_slices_joins_adjacent_blocks():
    slices = [
        TargetSlice(IndexRange((e, 0, f), (e + 1, 4, f + 2)), "p", (e - 2, 0, f)) for e in range(2, 5) for f in (0, 2)
    ]
    assert merge_slices(slices) == [TargetSlice(IndexRange((2, 0, 0), (5, 4, 4)), "p", (0, 0, 0))]
    elsewhere = TargetSlice(IndexRange((5, 0, 0), (6, 4, 4)), "p", (7, 0, 0))
    assert merge_slices([*slices, elsewhere]) == [*merge_slices(slices), elsewhere]


def test_loader_tracer_follows_transposed_copies_and_zeros():
    block = IndexRange((1, 0, 2), (3, 2, 4))
    found = _traced(lambda t: t[1:3, :, 2:].transpose(1, 2).contiguous(), lambda p: p[:2], (3, 2, 4), (2, 2, 2))
    assert found == {"t": [TargetSlice(block, "p", (0, 0, 0), "transposed")]}
    whole = IndexRange((0, 0), (6, 4))
    assert _traced(lambda t: t.zero_(), lambda p: p) == {"t": [TargetSlice(whole, "p", (0, 0), "zeros")]}


def test_loader_tracer_follows_a_decay_that_is_computed_before_or_in_its_parameter():
    """As in vLLM's Mamba and in its Mamba2."""
    block = IndexRange((2, 0), (4, 4))
    before = _traced(lambda t: (-torch.exp(t.float())).chunk(3)[1], lambda p: p[:2])
    assert before == {"t": [TargetSlice(block, "p", (0, 0), "decay")]}
    target = torch.zeros(2, 4)
    strides = torch.empty(6, 4, device="meta").stride()
    with LoaderTracer([View("a", "t", (6, 4), (6, 4), strides, 0)], {"p": target}) as tracer:
        ((_, tensor),) = tracer.weights()
        target.data.copy_(tensor[2:4])
        target.data.copy_(-torch.exp(target.float()))
    assert tracer.slices() == before


def test_loader_tracer_follows_queries_in_halves():
    found = _traced(lambda t: t.view(2, 2, 2, 4).transpose(1, 2).reshape(8, 4)[4:], lambda p: p[:4], (8, 4))
    assert found == {"t": [TargetSlice(IndexRange((4, 0), (8, 4)), "p", (0, 0), "halves")]}


def test_loader_tracer_follows_the_experts_that_a_worker_picks():
    found = _traced(lambda t: t[torch.tensor([2, 3])], lambda p: p[:2], (6, 4))
    assert found == {"t": [TargetSlice(IndexRange((2, 0), (4, 4)), "p", (0, 0))]}


def test_loader_tracer_follows_views_that_are_joined():
    target = torch.zeros(5, 3)
    views = [View(name, name, (rows, 3), (rows, 3), (3, 1), 0) for name, rows in (("a", 2), ("b", 3))]
    with LoaderTracer(views, {"p": target}) as tracer:
        target.data.copy_(torch.cat([tensor for _, tensor in tracer.weights()]))
    assert tracer.slices() == {
        "a": [TargetSlice(IndexRange((0, 0), (2, 3)), "p", (0, 0))],
        "b": [TargetSlice(IndexRange((0, 0), (3, 3)), "p", (2, 0))],
    }


@pytest.mark.parametrize(
    ("view", "place", "words"),
    [
        (lambda t: t.view(3, 2, 4).permute(1, 0, 2), lambda p: p.view(2, 3, 4), "not a contiguous block"),
        (lambda t: t[::2], lambda p: p[:3], "not a contiguous block"),
        (lambda t: t + 0, lambda p: p, "that it has made"),
        (lambda t: t, lambda p: p.clone(), "not a parameter"),
    ],
)
def test_loader_tracer_refuses_loaders_that_do_more_than_copy_blocks(view, place, words):
    with pytest.raises(ValueError, match=words):
        _traced(view, place)


def test_loader_tracer_refuses_other_permutations():
    with pytest.raises(ValueError, match="permutes dims of t"):
        _traced(lambda t: t.permute(1, 0, 2), lambda p: p, (3, 2, 4), (2, 3, 4))
