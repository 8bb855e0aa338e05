"""Which stream a worker gets, and what is in the one of whole experts."""

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.parallelize import layer_names
from epfsdp2.rollout import naming
from epfsdp2.rollout.placement import Rollout
from epfsdp2.rollout.streams import RolloutSync, SyncSettings, choose_stream, for_this_worker, obstacle
from tests.support.engine import sharded_model
from tests.support.models import reference_model, save_qwen3_moe
from tests.support.ranks import run_ranks

WORLD = 4


@pytest.mark.parametrize(
    ("wanted", "family", "rollout", "hindrance", "stream", "reason"),
    [
        ("auto", "qwen3_moe", Rollout(1), "", "sliced", ""),
        ("auto", "qwen3_moe", Rollout(2), "", "sliced", ""),
        ("auto", "qwen3_moe", Rollout(1, 2, expert_parallel=True), "", "sliced", ""),
        ("auto", "gpt_oss", Rollout(2), "", "full", "how vLLM cuts a gpt_oss is not known"),
        ("sliced", "qwen3_moe", Rollout(1), "", "sliced", ""),
        (
            "sliced",
            "qwen3_moe",
            Rollout(2),
            "the rollout is pipeline-parallel",
            "full",
            "the rollout is pipeline-parallel",
        ),
        ("expert_local", "qwen3_moe", Rollout(2, expert_parallel=True), "", "expert_local", ""),
        ("expert_local", "qwen3_moe", Rollout(2), "", "full", "vLLM runs without expert parallelism"),
        ("full", "gpt_oss", Rollout(2), "anything", "full", ""),
    ],
)
def test_the_stream_and_why(wanted, family, rollout, hindrance, stream, reason):
    assert choose_stream(wanted, family, rollout, hindrance) == (stream, reason)


@pytest.mark.parametrize(
    ("config", "is_ours", "words"),
    [
        ({}, True, ""),
        ({}, False, "worker_extension_cls"),
        ({"pipeline_model_parallel_size": 2}, True, "pipeline"),
        ({"engine_kwargs": {"vllm": {"enable_eplb": True}}}, True, "moves experts"),
        ({"disaggregation": {"enabled": True}}, True, "prefill"),
        ({"quantization": "fp8"}, True, "quantises"),
    ],
)
def test_what_allows_the_full_stream_alone(config, is_ours, words):
    said = obstacle(config, is_ours)
    assert words in said and bool(said) == bool(words)


def test_what_is_not_of_this_engine_is_left_alone():
    weights = iter([("a", torch.ones(1))])
    assert for_this_worker(weights, None, 0, True) is weights


def _whole_experts(folder):
    rank = dist.get_rank()
    model, meshes = sharded_model(folder, WORLD, 2)
    sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", 1 << 30, 6000))
    wanted = dict(naming.as_checkpoint(model, reference_model(folder).named_parameters()))
    got = dict(sync.weights().for_worker("expert_local", Rollout(2, 2, expert_parallel=True), rank))
    mine = {name for name in wanted if ".experts." not in name or f".experts.{2 * rank}." in name}
    mine |= {name for name in wanted if f".experts.{2 * rank + 1}." in name}
    assert got.keys() == mine
    assert all(torch.equal(got[name], wanted[name]) for name in mine)
    full = dict(sync.weights())
    assert full.keys() == dict(reference_model(folder).named_parameters()).keys()


def test_a_worker_with_whole_experts_gets_its_own_under_their_names(tmp_path):
    run_ranks(_whole_experts, WORLD, save_qwen3_moe(tmp_path))
