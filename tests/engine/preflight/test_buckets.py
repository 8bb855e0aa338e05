"""Sizes of a weight sync's buckets, compared with the largest tensor and the free memory."""

import math
import shutil
from collections import namedtuple

import pytest

from epfsdp2.engine.preflight.model import inspect_model, largest_sent
from epfsdp2.engine.preflight.rollout import check_rollout
from epfsdp2.engine.preflight.run import check_run
from tests.support.trainer.preflight import BUCKET, refused, rollout
from tests.support.trainer.settings import checkpoint, engine

DISK = namedtuple("DISK", "total used free")
VLLM = {"name": "vllm", "n_gpus_per_node": 2}


@pytest.fixture
def free(monkeypatch):
    """Return a function that sets the free megabytes of /dev/shm, at first many."""

    def free(megabytes):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: DISK(0, 0, megabytes << 20))

    free(1 << 20)
    return free


def _check(model, megabytes, settings=None, ipc=False, **more):
    placed = VLLM | {"update_weights_bucket_megabytes": megabytes, **more}
    check_run(settings or engine(), 2, model, placed, device="cpu", ipc=ipc)


@pytest.mark.parametrize(
    ("stored", "computed", "megabytes"), [("fp32", "fp32", 16), ("fp32", "bf16", 8), ("bf16", "fp32", 8)]
)
def test_bucket_smaller_than_the_largest_tensor_as_it_is_sent_is_refused(
    model, free, stacks_are_sent, stored, computed, megabytes
):
    # [8, 2 * 256, 1024]: 16 MB in float32; one expert of it is 2 MB.
    model["override_config"] |= {"hidden_size": 1024, "moe_intermediate_size": 256}
    settings = engine(model_dtype=stored, mixed_precision={"param_dtype": computed})
    _check(model, megabytes, settings)
    with refused(BUCKET, megabytes - 1, "gate_up_proj", works=f"{BUCKET}={megabytes}"):
        _check(model, megabytes - 1, settings)
    # With shared device memory, a tensor larger than a bucket is sent by itself.
    _check(model, megabytes - 1, settings, ipc=True)


def test_bucket_of_modules_in_float32_counts_the_largest_tensor_in_float32(model, free):
    # A head of 6 M elements; gate_up_proj has 8 M.
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "vocab_size": 6144, "tie_word_embeddings": False}
    model["override_config"] |= sizes
    _check(model, 23)
    with refused(BUCKET, 23, f"the largest tensor, lm_head.weight, is {24 << 20} bytes"):
        _check(model, 23, engine(fp32_modules=["lm_head"]))


def test_bucket_where_vllm_takes_experts_one_by_one_has_to_hold_one(tmp_path, free):
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 8}
    model = checkpoint(tmp_path, "hunyuan_v1_moe", **sizes, **heads)
    facts = inspect_model(model)
    assert max(math.prod(shape) for shape, *_ in facts.stacked) == 8 * 2 << 20
    name, elements = largest_sent(facts.model)
    assert elements == 1 << 20 and ".experts.0." in name
    _check(model, 2)
    with refused(BUCKET, 1, f"the largest tensor, {name}, "):
        _check(model, 1)
    # A dense tensor that is larger counts.
    model["override_config"] |= {"vocab_size": 4096}
    assert largest_sent(inspect_model(model).model)[1] == 4096 * 1024


def test_bucket_of_rollouts_in_other_processes_is_checked_and_needs_no_dev_shm(model, free):
    free(0)
    _check(model, 1, backend="epfsdp2_p2p")
    with refused(BUCKET, 0, "the largest tensor"):
        _check(model, 0, backend="epfsdp2_p2p")


def test_dev_shm_smaller_than_one_bucket_per_local_rank_is_refused(model, free):
    facts = inspect_model(model)
    placed = {"n_gpus_per_node": 4, "update_weights_bucket_megabytes": 100}
    free(464)
    check_rollout(engine(), 8, placed, facts)
    free(463)
    with refused(BUCKET, 100, "4 ranks", "463 MB are free", f"{BUCKET}=99"):
        check_rollout(engine(), 8, placed, facts)
    check_rollout(engine(), 3, placed, facts)
    free(64)
    with refused(BUCKET, 100, "a /dev/shm of 68 MB or more (docker run --shm-size)"):
        check_rollout(engine(), 8, placed, facts)


@pytest.mark.parametrize("expert_parallel", [1, 2])
def test_sync_megabytes_below_one_row_are_refused(model, expert_parallel):
    # gate_up_proj [2048, 2048, 2048] in bfloat16: one row of each expert is 8 MB. Without expert parallelism the same
    # rank sends it to both workers.
    model["override_config"] |= {"num_experts": 2048, "moe_intermediate_size": 1024, "hidden_size": 2048}
    placed, row = rollout(expert_parallel_size=expert_parallel), 16 // expert_parallel
    check_run(engine(sync_megabytes=5 * row, expert_shard_dim=1), 2, model, placed, device="cpu")
    works = f"engine.sync_megabytes={5 * row}"
    with refused("engine.sync_megabytes", 5 * row - 1, f"{row << 20} bytes on a rank", works=works):
        check_run(engine(sync_megabytes=5 * row - 1, expert_shard_dim=1), 2, model, placed, device="cpu")
    check_run(engine(rollout_sync="full", sync_megabytes=1), 2, model, placed, device="cpu")
