"""Real vLLM workers that get values in FP8 or INT8 and scales equal workers that load a quantised checkpoint."""

import json

import pytest
import torch
import torch.distributed as dist

from tests.support.engine.sharded import sharded_model
from tests.support.models.quantised import BLOCK, SIZES, save_compressed, save_quantised
from tests.support.models.tiny import save_qwen3, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.rollout.verls_transport import send

pytestmark = pytest.mark.e2e
with_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(),
    reason="vLLM's CPU build has kernels for FP8, and for experts in INT8, for processors with AMX alone",
)


def _send(syncs, handles, held):
    """Send a checkpoint in each sync, with doubled values of the tensors with a name, if there is one."""
    from epfsdp2.engine.model.layers import layer_names
    from epfsdp2.rollout.layout.specs import Rollout
    from epfsdp2.rollout.sync import RolloutSync, SyncSettings
    from epfsdp2.rollout.transport.checksums import with_checksums
    from epfsdp2.rollout.transport.watched_sockets import WeightSyncError

    world = dist.get_world_size()
    for folder, wrong in syncs:
        has_experts = "moe" in json.loads((folder / "config.json").read_text())["model_type"]
        model, meshes = sharded_model(folder, world, ep=world if has_experts else 1)
        dtypes = dict.fromkeys((name for name, _ in model.named_parameters()), torch.bfloat16)
        sync = RolloutSync(model, meshes, layer_names(model), dtypes, SyncSettings("sliced", 1 << 22, verify_syncs=-1))
        weights = sync.weights().for_worker("sliced", Rollout(world, **held), is_quantised=True)
        assert weights.has_checksums and weights.is_quantised_here
        sums = with_checksums(weights.tensors())
        tensors = ((name, values * 2 if wrong and wrong in name else values) for name, values in sums)
        try:
            send(tensors, handles, megabytes=4)
        except WeightSyncError:
            assert wrong


def _check(engine, first, second, held, wrong):
    def computes():
        return engine.call("epfsdp2_digests"), engine.generating()

    def found(computed):
        digests, generated = computed
        return [answer["digests"] for answer in digests.result()], generated.result()

    loaded = found(computes())
    arguments = {"use_shm": True, "sync_timeout_seconds": 180.0, "verify": True, "is_quantised": True}
    calls, after = [], []
    for _ in range(3):
        calls.append(engine.call("update_weights_from_ipc", timeout=400.0, **arguments))
        after.append(computes())
    handles = [engine.handle(rank) for rank in range(engine.tp_size)]
    run_ranks(_send, engine.tp_size, [(second, ""), (first, ""), (second, wrong)], handles, held, timeout=400)
    changed = found(after[0])
    # A leading underscore marks vLLM's own state, such as scales of its cache.
    trained = [name for name in loaded[0][0] if "norm" not in name and "._" not in name]
    assert [name for name in trained if changed[0][0][name] == loaded[0][0][name]] == []
    assert changed[1] != loaded[1]
    assert found(after[1]) == loaded
    with pytest.raises(RuntimeError, match=f"the received values of .*{wrong}.* differ"):
        calls[2].result()
    assert engine.leftovers() == []


@with_amx
@pytest.mark.parametrize("tp", [1, 2])
def test_vllm_fp8_workers_after_syncs_hold_what_vllm_loads_of_a_quantised_checkpoint(start_engine, tmp_path, tp):
    first, second = (save_qwen3_moe(tmp_path / str(seed), seed, vocab_size=256, **SIZES) for seed in (1, 2))
    engine = start_engine(
        str(save_quantised(first, tmp_path / "quantised")),
        tp_size=tp,
        dtype="bfloat16",
        environment={"VERL_VLLM_FP8_QUANT_ENABLED": "1"},
    )
    assert any(digest.startswith("float8_e4m3fn[4, ") for digest in engine.digests()[0].values())
    _check(engine, first, second, {"block": BLOCK}, "w2_weight_scale_inv")


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("save", [save_qwen3, pytest.param(save_qwen3_moe, marks=with_amx)])
def test_vllm_int8_workers_after_syncs_hold_what_vllm_loads_of_a_compressed_checkpoint(
    start_engine, tmp_path, save, tp
):
    sizes = {"vocab_size": 256, **SIZES}
    if save is save_qwen3:
        sizes = {name: size for name, size in sizes.items() if "experts" not in name and "moe" not in name}
    first, second = (save(tmp_path / str(seed), seed, **sizes) for seed in (1, 2))
    engine = start_engine(str(save_compressed(first, tmp_path / "quantised", "int8")), tp_size=tp, dtype="bfloat16")
    digests = engine.digests()[0]
    assert digests["model.layers.0.self_attn.qkv_proj.weight_scale"].startswith("float32["), digests
    _check(engine, first, second, {"channels": "int8"}, "qkv_proj.weight_scale")
