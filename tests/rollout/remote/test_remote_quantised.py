"""FP8 and INT8 to rollouts in processes of their own have the bits that vLLM makes of the whole weights."""

import os
import time
from functools import partial

import pytest
import torch

from epfsdp2.engine.quantise.shards import QuantisedShards
from epfsdp2.rollout import sync
from epfsdp2.rollout.servers import server_of
from epfsdp2.rollout.transport.watched_sockets import WeightSyncError
from tests.support.models.quantised import BLOCK, COMPRESSED, SIZES, compressed
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.rollout.remote.member import Member, check_equal, taken

SECONDS = 30.0
FP8 = {"quantization": "fp8"}
INT8 = {"vllm": {"hf_overrides": {"quantization_config": COMPRESSED["int8"]}}}


class _Hsdp(Member):
    """Two replicas of two trainer ranks; each replica sends to one worker."""

    trainers, mesh = 4, (2, 2)


def _of_vllm(weight):
    """Values and scales as vLLM's online quantisation makes them; of stacks, expert by expert."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    if weight.dim() == 2:
        return per_block_cast_to_fp8(weight, [BLOCK, BLOCK], use_ue8m0=False)
    values, scales = zip(*map(_of_vllm, weight), strict=True)
    return torch.stack(values), torch.stack(scales)


def _sent(folder):
    member = _Hsdp(folder, SECONDS, limit=1 << 20)
    exporter = member.exporter(dtype=torch.bfloat16, verify=-1) if member.is_trainer else None
    for settings, quantise in ((FP8, _of_vllm), (INT8, partial(compressed, kind="int8"))):
        config = member.config(**settings)
        rollout = server_of(config).rollout_of(config)
        for _ in range(2):
            got = member.sync(lambda: exporter.weights(), **settings)
            if not member.is_trainer:
                wanted = member.parameters(member.index, rollout=rollout, quantise=quantise)
                assert {torch.float32, torch.bfloat16} < {values.dtype for values in wanted.values()}
                check_equal(got, wanted)
            with torch.no_grad():
                for param in member.model.parameters() if member.is_trainer else member.whole.values():
                    param.mul_(3)

    # One raises where the others wait for its largest values: they raise its cause soon.
    def failing(name, tensor):
        member.facts.set("raised", str(time.monotonic()))
        raise ValueError("a fault in a shard")

    member.connect()
    with pytest.raises(WeightSyncError, match="trainer rank 1: .*ValueError: a fault in a shard"):
        if member.rank == 1:
            sync.QuantisedShards = lambda weights, values, *others: QuantisedShards(weights, failing, *others)
        if member.is_trainer:
            member.send(exporter.weights())
        received = member.engine.receive_weights().for_rollout(member.config(**FP8), member.index)
        assert received.is_quantised_here and received.has_checksums
        scales = {name for name in received.planned_layouts()[member.index] if name.endswith("_scale_inv")}
        assert any(name.endswith("w13_weight_scale_inv") for name in scales)
        taken(received.tensors())
    assert time.monotonic() - float(member.facts.get("raised")) < SECONDS / 4
    member.meet()
    os._exit(0)  # the others' reductions are still under way


def test_quantised_weights_of_hsdp_trainers_have_vllms_bits_in_separate_workers_every_sync(tmp_path):
    save_qwen3_moe(tmp_path / "model", **SIZES)
    run_ranks(_sent, _Hsdp.trainers + _Hsdp.tp, tmp_path, timeout=400)
