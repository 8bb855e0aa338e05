"""Sizes of a weight sync's buckets, compared with the largest tensor and the free memory."""

import math
import re
import shutil
from collections import namedtuple

import pytest

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight.model_facts import inspect_model, largest_sent
from epfsdp2.engine.preflight.rollout import check_rollout
from epfsdp2.engine.preflight.run import check_run
from tests.support.trainer.preflight import BUCKET, paragraph, rollout
from tests.support.trainer.settings import checkpoint, engine

DISK = namedtuple("DISK", "total used free")


@pytest.mark.parametrize(
    "stored, computed, megabytes", [("fp32", "fp32", 16), ("fp32", "bf16", 8), ("bf16", "bf16", 8), ("bf16", "fp32", 8)]
)
def test_bucket_smaller_than_the_largest_tensor_as_it_is_sent_is_refused(
    tmp_path, monkeypatch, stacks_are_sent, stored, computed, megabytes
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DISK(0, 0, 1 << 40))
    model = checkpoint(tmp_path)
    # [8, 2 * 256, 1024]: 16 MB in float32; one expert of it is 2 MB.
    model["override_config"] |= {"hidden_size": 1024, "moe_intermediate_size": 256}
    rollout = {"name": "vllm", "n_gpus_per_node": 2, "update_weights_bucket_megabytes": megabytes}
    settings = engine(model_dtype=stored, mixed_precision={"param_dtype": computed})
    check_run(settings, 2, model, rollout, device="cpu", ipc=False)
    with pytest.raises(SettingError) as caught:
        too_small = rollout | {"update_weights_bucket_megabytes": megabytes - 1}
        check_run(settings, 2, model, too_small, device="cpu", ipc=False)
    text = paragraph(caught.value, BUCKET, megabytes - 1)
    assert "gate_up_proj" in text and text.endswith(f"{BUCKET}={megabytes}")
    # With shared device memory, a tensor larger than a bucket is sent by itself.
    check_run(settings, 2, model, too_small, device="cpu", ipc=True)


def test_bucket_of_modules_in_float32_counts_the_largest_tensor_in_float32(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DISK(0, 0, 1 << 40))
    model = checkpoint(tmp_path)
    # A head of 6 M elements; gate_up_proj has 8 M.
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "vocab_size": 6144, "tie_word_embeddings": False}
    model["override_config"] |= sizes
    rollout = {"name": "vllm", "n_gpus_per_node": 2, "update_weights_bucket_megabytes": 23}
    settings = engine()
    check_run(settings, 2, model, rollout, device="cpu", ipc=False)
    settings.fp32_modules = ["lm_head"]
    with pytest.raises(SettingError, match=f"{BUCKET}=23: the largest tensor, lm_head.weight, is {24 << 20} bytes"):
        check_run(settings, 2, model, rollout, device="cpu", ipc=False)


def test_bucket_where_vllm_takes_experts_one_by_one_has_to_hold_one(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DISK(0, 0, 1 << 40))
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 8}
    model = checkpoint(tmp_path, "hunyuan_v1_moe", **sizes, **heads)
    facts = inspect_model(model)
    assert max(math.prod(shape) for shape, *_ in facts.stacked) == 8 * 2 << 20
    name, elements = largest_sent(facts.model)
    assert elements == 1 << 20 and ".experts.0." in name
    rollout = {"name": "vllm", "n_gpus_per_node": 2, "update_weights_bucket_megabytes": 2}
    check_run(engine(), 2, model, rollout, device="cpu", ipc=False)
    with pytest.raises(SettingError, match=f"{BUCKET}=1: the largest tensor, {re.escape(name)}, "):
        check_run(engine(), 2, model, rollout | {"update_weights_bucket_megabytes": 1}, device="cpu", ipc=False)
    # A dense tensor that is larger counts.
    model["override_config"] |= {"vocab_size": 4096}
    assert largest_sent(inspect_model(model).model)[1] == 4096 * 1024


def test_bucket_of_rollouts_in_other_processes_is_checked_and_needs_no_dev_shm(model, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: DISK(1, 1, 0))
    apart = {"name": "vllm", "backend": "epfsdp2_p2p", "update_weights_bucket_megabytes": 1}
    check_run(engine(), 2, model, apart, device="cpu", ipc=False)
    with pytest.raises(SettingError, match=f"{BUCKET}=0: the largest tensor"):
        check_run(engine(), 2, model, apart | {"update_weights_bucket_megabytes": 0}, device="cpu", ipc=False)


def test_dev_shm_smaller_than_one_bucket_per_local_rank_is_refused(model, monkeypatch):
    facts = inspect_model(model)
    rollout = {"n_gpus_per_node": 4, "update_weights_bucket_megabytes": 100}

    def free(megabytes):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: DISK(0, 0, megabytes << 20))

    free(464)
    check_rollout(engine(), 8, rollout, facts)
    free(463)
    with pytest.raises(SettingError) as caught:
        check_rollout(engine(), 8, rollout, facts)
    text = paragraph(caught.value, BUCKET, 100)
    assert "4 ranks" in text and "463 MB are free" in text and f"{BUCKET}=99" in text
    check_rollout(engine(), 3, rollout, facts)
    free(64)
    with pytest.raises(SettingError, match=r"a /dev/shm of 68 MB or more \(docker run --shm-size\)"):
        check_rollout(engine(), 8, rollout, facts)


@pytest.mark.parametrize("wanted, expert_parallel", [("sliced", 1), ("auto", 1), ("sliced", 2)])
def test_sync_megabytes_below_one_row_are_refused(model, wanted, expert_parallel):
    # gate_up_proj [2048, 2048, 2048] in bfloat16: one row of each expert is 8 MB. Without expert parallelism the same
    # rank sends it to both workers.
    model["override_config"] |= {"num_experts": 2048, "moe_intermediate_size": 1024, "hidden_size": 2048}
    placed, row = rollout(expert_parallel_size=expert_parallel), 16 // expert_parallel
    settings = {"rollout_sync": wanted, "expert_shard_dim": 1}
    check_run(engine(sync_megabytes=5 * row, **settings), 2, model, placed, device="cpu")
    with pytest.raises(SettingError) as caught:
        check_run(engine(sync_megabytes=5 * row - 1, **settings), 2, model, placed, device="cpu")
    text = paragraph(caught.value, "engine.sync_megabytes", 5 * row - 1)
    assert f"{row << 20} bytes on a rank" in text and text.endswith(f"engine.sync_megabytes={5 * row}")
    check_run(engine(rollout_sync="full", sync_megabytes=1), 2, model, placed, device="cpu")
