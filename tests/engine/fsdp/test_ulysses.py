"""Ranks that share rows equal the plain model in one process."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.fsdp.ulysses import SequenceParallel, check_attention_splits
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.packing.sequences import PackedSequences
from tests.parity.families import ALL, BY_SEQUENCES, FAMILIES
from tests.support.engine.rows import LENGTHS, errors, one_by_one, own_slice, packed, row
from tests.support.engine.varlen_kernels import flash_by_sdpa
from tests.support.models.tiny import relative_error, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import check_ppo_updates, of_this_rank, ppo_batch, ppo_samples, ppo_worker

WORLD = 4
RELATIVE = 1e-5  # of updates, in float32
EXACT = 1e-6  # of attention, in float64; norms and some routers always compute in float32
# The windows of sliding layers are shorter than sequences.
WINDOWS = {
    "afmoe": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5},
    "gpt_oss": {"sliding_window": 5},
    "mixtral": {"sliding_window": 5},
}
NOT_SPLIT = ("inkling2", "inkling2_loop")
# BY_SEQUENCES are in test_shared_mixers.py.
# A classifier that sees both ways, without attention on transformers' interface that runs on a CPU. Heads of a tiny
# Step-3.7 that four ranks do not divide.
OTHERS = ("openai_privacy_filter", "step3p7")
SPLIT = [name for name in ALL if name not in (*NOT_SPLIT, *BY_SEQUENCES, *OTHERS)]
# Keys of fewer heads than ranks. Windows and full attention in turns. Values narrower than keys. Sinks. Queries that
# are scaled by their position or by their index.
KINDS = ["qwen3_moe", "gemma4", "deepseek_v3", "gpt_oss", "mistral4", "llama4"]


def _family(name):
    """The model in float64."""
    return ALL[name].build_random(ALL[name].attention, **WINDOWS.get(name, {}))


def _groups():
    """Return this rank's group of two, and the group of all."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return [pairs[dist.get_rank() // 2], dist.group.WORLD]


def _compare(names, checkpointings):
    groups = _groups()
    for i, name in enumerate(names):
        wanted = one_by_one(_family(name))
        for group in groups:
            how = checkpointings[i % len(checkpointings)]
            found = errors(_family(name), group, wanted, checkpointing=how)
            bad = {n: error for n, error in found.items() if error > EXACT}
            assert not bad, (name, dist.get_world_size(group), how, bad)


@pytest.mark.long
def test_ulysses_of_every_family_equals_the_plain_model():
    run_ranks(_compare, WORLD, SPLIT, ["none", "full", "selective"], timeout=500)


def _flash_sees_whole_rows():
    group, (ids, _), calls = dist.group.WORLD, row(), []
    wanted, model = one_by_one(_family("qwen3_moe")), _family("qwen3_moe")
    ALL_ATTENTION_FUNCTIONS.register("flash_attention_2", functools.partial(flash_by_sdpa, calls))
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flash_attention_2"
    SequenceParallel(model, group, PackedSequences(model))
    own = own_slice(LENGTHS, group)
    assert relative_error(packed(model, ids, own), wanted[0][:, own]) < EXACT
    assert calls == [([0, *itertools.accumulate(LENGTHS)], max(LENGTHS))] * len(layer_names(model))


def _kinds():
    _compare([name for name in KINDS if name in ALL], ["none", "full"])
    _flash_sees_whole_rows()


def test_ulysses_with_every_kind_of_attention_or_with_flash_attention_equals_the_plain_model():
    run_ranks(_kinds, WORLD)


def _sp(size, ep, **settings):
    return {"ep": ep, "ulysses_sequence_parallel_size": size, **settings}


MESHES = [_sp(sp, ep) for sp in (2, 4) for ep in (1, 2, 4)]
MESHES += [
    _sp(2, 2, fsdp_size=2),
    _sp(4, 1, fsdp_size=2),  # a row across two copies of the model
    _sp(2, 2, activation_checkpointing="selective"),
    _sp(2, 2, dynamic=True, pad_to_length=True, pad_to_length_bucket=17),
    _sp(2, 2, dynamic=True, use_no_sync_for_gradient_accumulation=True),
    _sp(2, 2, param_offload=True, optimizer_offload=True),
    _sp(2, 2, offload_policy=True),
    _sp(2, 4, pad_to_length=True, pad_to_length_bucket=32),
    _sp(2, 2, chunked_logits=False, entropy_from_logits_with_chunking=True, entropy_from_logits_chunk_size=8),
    _sp(2, 2, chunked_logits=False, entropy_checkpointing=True, reshard_after_forward=False),
]
# Two heads of keys on four ranks: each is there twice.
USUAL = [_sp(4, 4, dynamic=True, pad_to_length=True, pad_to_length_bucket=20, activation_checkpointing="full")]


@pytest.mark.parametrize("cases", [USUAL, pytest.param(MESHES, marks=pytest.mark.long)], ids=["usual", "every mesh"])
def test_ulysses_in_a_ppo_update_equals_the_plain_model(tmp_path, cases):
    pytest.importorskip("verl")
    run_ranks(check_ppo_updates, WORLD, save_qwen3_moe(tmp_path), cases, timeout=600)


def _replays(folder):
    """Routes of the log-probs, and of a rollout with another router, are the same with shared rows."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import EngineRouterReplayConfig

    samples, results = ppo_samples(), {}
    for sp, mode in ((1, "R2"), (2, "R2"), (1, "R3"), (2, "R3")):
        worker = ppo_worker(folder, **_sp(sp, 2, router_replay=EngineRouterReplayConfig(mode=mode)))
        infer, train = (ppo_batch(of_this_rank(worker, samples)) for _ in range(2))
        if mode == "R3":
            others = [(own + 1) % 8 for own in of_this_rank(worker, results[1, "R2"]["routes"])]
            infer["routed_experts"] = train["routed_experts"] = torch.nested.as_nested_tensor(
                others, layout=torch.jagged
            )
        tu.assign_non_tensor(infer, compute_loss=False)
        output = worker.infer_batch(infer)
        found = [None] * 2
        if mode == "R2":  # only the first rank of a row returns routes, which verl passes to the others
            dist.all_gather_object(found, None if output is None else list(tu.get(output, "routed_experts").unbind()))
            routes = [own for part in found if part is not None for own in part]
            here = of_this_rank(worker, routes)
            train["routed_experts"] = torch.nested.as_nested_tensor(list(here), layout=torch.jagged)
            results[sp, mode] = {"routes": routes}
        trained = worker.train_batch(train)
        dist.all_gather_object(found, None if trained is None else tu.get(trained, "metrics"))
        results.setdefault((sp, mode), {})["metrics"] = found[0]

    apart, shared = results[1, "R2"], results[2, "R2"]
    assert len(apart["routes"]) == len(shared["routes"]) == len(samples)
    assert all(torch.equal(a, b) for a, b in zip(apart["routes"], shared["routes"], strict=True))
    for mode in ("R2", "R3"):
        norms = [results[sp, mode]["metrics"]["grad_norm"] for sp in (1, 2)]
        assert abs(norms[1] / norms[0] - 1) < RELATIVE, (mode, norms)
    assert shared["metrics"]["router_replay_differing"] == [[0.0]]
    # The share is over all tokens of all ranks.
    ((of_all,),) = results[2, "R3"]["metrics"]["router_replay_differing"]
    assert results[1, "R3"]["metrics"]["router_replay_differing"] == [[of_all], [of_all]] and of_all > 0.9


def test_ulysses_with_router_replay_takes_the_recorded_routes(tmp_path):
    pytest.importorskip("verl")
    run_ranks(_replays, 2, save_qwen3_moe(tmp_path))


def test_check_attention_splits_of_heads_that_do_not_divide_names_the_sizes_that_work():
    with torch.device("meta"):
        model = FAMILIES["qwen3_moe"].build()
    check_attention_splits(model, 4)
    with pytest.raises(SettingError, match=r"Qwen3MoeForCausalLM, 4\. What works: .*size= one of \[1, 2, 4\]"):
        check_attention_splits(model, 3)
