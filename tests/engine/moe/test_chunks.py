"""Overlap that the settings leave open: chunks by sizes, and shared experts where blocks allow it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from epfsdp2.engine.config import engine_config
from epfsdp2.engine.config.automatic import AutomaticOverlap
from epfsdp2.engine.config.settings import sharding_options
from epfsdp2.engine.integration import building
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.moe.chunks import DispatchSizes
from epfsdp2.engine.moe.find import find_experts
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.recipes.plan.cards import config_of
from epfsdp2.recipes.plan.cli import parse, request_of
from epfsdp2.recipes.plan.meshes import choices
from epfsdp2.recipes.plan.roofline import Cluster
from tests.parity import families
from tests.support.models.own_model import PLAN, OwnModel

QWEN3_30B = DispatchSizes(rows=8, row_bytes=2 * 2048, elements=3 * 2048 * 768, experts=128, shared=False)
TOKENS = 16384


def test_chunks_of_more_tokens_or_of_slower_links_are_more():
    by_tokens = [QWEN3_30B.chunks(tokens, 8, 1, True) for tokens in (0, 1, 256, 1024, 8192, 16384, 65536)]
    assert by_tokens == [1, 1, 1, 1, 2, 3, 4]
    assert QWEN3_30B.chunks(4096, 16, 1, True) > QWEN3_30B.chunks(4096, 8, 1, True)  # two nodes
    assert QWEN3_30B.chunks(4096, 8, 2, True) > QWEN3_30B.chunks(4096, 8, 1, True)  # so are eight pairs
    # Mixtral 8x7B: its all-to-alls take a twentieth of the products.
    mixtral = replace(QWEN3_30B, rows=2, row_bytes=8192, elements=3 * 4096 * 14336, experts=8)
    assert mixtral.chunks(8192, 8, 1, True) == 1
    # A layer that is recomputed to its end anyway has no fewer chunks.
    for tokens in (1024, 4096, 8192, 16384):
        fewer, more = QWEN3_30B.chunks(tokens, 8, 1, True), replace(QWEN3_30B, shared=True).chunks(tokens, 8, 1, True)
        assert fewer <= more
    assert QWEN3_30B.chunks(4096, 8, 1, False) > QWEN3_30B.chunks(4096, 8, 1, True)


def _sizes(model, dtype=torch.bfloat16):
    return DispatchSizes.of(model, find_experts(model), dtype)


def test_dispatch_sizes_of_a_published_model_are_read_from_its_blocks():
    model = build_on_meta(AutoModelForCausalLM, config_of("Qwen3-30B-A3B"), torch.float32)
    assert _sizes(model) == QWEN3_30B
    assert _sizes(model, torch.float32).row_bytes == 4 * 2048
    assert all(param.is_meta for param in model.parameters()) and "forward" not in vars(model.model.layers[0].mlp)
    own = OwnModel(PretrainedConfig())  # its experts dispatch tokens themselves
    assert DispatchSizes.of(own, find_experts(own, PLAN), torch.float32) is None


def test_dispatch_sizes_of_a_block_that_changes_the_input_of_its_shared_experts_allow_no_overlap(monkeypatch):
    model = families.FAMILIES["glm4_moe"].build()
    block = type(model.get_submodule(find_experts(model)[0].fqn.rpartition(".")[0]))

    def forward(self, hidden_states):
        flat = hidden_states.flatten(0, 1)
        ids = torch.zeros(len(flat), 2, dtype=torch.long, device=flat.device)
        routed = self.experts(flat, top_k_index=ids, top_k_weights=ids.to(flat.dtype))
        return routed.view_as(hidden_states) + self.shared_experts(hidden_states + 1)

    assert _sizes(model).shared
    monkeypatch.setattr(block, "forward", forward)
    assert _sizes(model).rows == 2 and not _sizes(model).shared


def _automatic(family="glm4_moe", **settings):
    config = engine_config(ep_size=8, **settings)
    options = sharding_options(config)
    overlap = AutomaticOverlap.of(config, families.FAMILIES[family].build(), options)
    if overlap.sizes is not None:  # as of a model whose rows are worth it
        overlap = replace(overlap, sizes=replace(QWEN3_30B, shared=overlap.sizes.shared))
    return overlap, options


def _overlapped(topology, tokens=TOKENS, **settings):
    overlap, options = _automatic(**settings)
    found = overlap.on(options, topology, tokens)
    assert replace(found, dispatch_chunks=1, overlap_shared_experts=False) == replace(
        options, dispatch_chunks=1, overlap_shared_experts=False
    )
    return found.dispatch_chunks, found.overlap_shared_experts


def test_automatic_overlap_leaves_what_is_set_and_what_can_not_overlap():
    eight = Topology.arrange(8, 8)
    assert _overlapped(eight) == (3, True)
    assert _overlapped(eight, dispatch_chunks=1) == (1, True)
    assert _overlapped(eight, dispatch_chunks=4, overlap_shared_experts=False) == (4, False)
    assert _overlapped(eight, dispatcher="deepep") == (1, False)
    assert _overlapped(eight, family="qwen2_moe", dispatch_chunks=2) == (2, False)
    assert _overlapped(Topology.arrange(8, 1)) == (1, False)
    assert _overlapped(eight, tokens=None) == (1, True)
    assert _overlapped(eight, fp32_modules=["*.shared_experts"]) == (3, False)  # gathered when they are called


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cuda", {"max_token_len_per_gpu": TOKENS}, 3),
        ("cuda", {"forward_only": True, "infer_max_token_len_per_gpu": 4 * TOKENS}, 4),
        ("cuda", {"use_dynamic_bsz": False}, 1),
        ("cpu", {"max_token_len_per_gpu": TOKENS}, 1),
    ],
)
def test_overlap_of_a_run_is_by_the_most_tokens_on_a_gpu(monkeypatch, capsys, device, settings, expected):
    monkeypatch.setattr(building, "get_device_name", lambda: device)
    model = build_on_meta(AutoModelForCausalLM, config_of("Qwen3-30B-A3B"), torch.bfloat16)
    config = replace(engine_config(ep_size=8), **{"use_dynamic_bsz": True, **settings})
    meshes = SimpleNamespace(topology=Topology.arrange(8, 8))
    run = SimpleNamespace(engine_config=config, _plain=model, meshes=meshes, rank=0)
    found = building.BuildsModel._overlapped(run, sharding_options(config, {"enable_gradient_checkpointing": True}))
    assert found.dispatch_chunks == expected
    said = f"[epfsdp2] all-to-alls overlap by engine.dispatch_chunks={expected} engine.overlap_shared_experts=False\n"
    assert capsys.readouterr().out == (said if expected > 1 else "")


def test_overlap_of_a_plan_is_that_of_a_run_on_each_mesh():
    config = config_of("Qwen3-30B-A3B")
    config.num_hidden_layers = 2
    request = request_of(parse(["--model", "Qwen3-30B-A3B", "--tokens", str(TOKENS)]), config)
    assert request.overlap.sizes == QWEN3_30B and request.options.dispatch_chunks == 1
    calls = {"all-to-all tokens": {}, "all-to-all counts": {}}
    for choice in choices(request, Cluster(nodes=1, gpus=8)):
        if choice.sp == 1 and choice.topology.etp == 1 and choice.topology.dp_replicate == 1 and choice.topology.ep > 1:
            for moved in choice.traffic:
                if moved.name in calls:
                    calls[moved.name][choice.topology.ep] = moved.calls
    assert calls["all-to-all counts"] == {2: 2, 4: 2, 8: 2}
    chunks = {ep: QWEN3_30B.chunks(TOKENS, ep, 1, True) for ep in (2, 4, 8)}
    assert chunks[8] > chunks[2] == 1
    # The first of the two layers is recomputed, without its combine if there is one chunk.
    assert calls["all-to-all tokens"] == {ep: n * (6 + 4) - (n == 1) for ep, n in chunks.items()}
