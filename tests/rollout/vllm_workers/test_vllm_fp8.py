"""Real vLLM workers in FP8 that trainer ranks send values and scales hold and compute what vLLM loads itself."""

import asyncio
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.engine.sharded import sharded_model
from tests.support.models.quantised import BLOCK, SIZES, save_quantised
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not torch.cpu._is_amx_tile_supported(), reason="vLLM's CPU build has FP8 kernels for processors with AMX alone"
    ),
]


def _send(folders, handles, wrong):
    from epfsdp2.engine.model.layers import layer_names
    from epfsdp2.rollout.layout.vllm_layout import Rollout
    from epfsdp2.rollout.server_adapter import send_weights
    from epfsdp2.rollout.sync import RolloutSync, SyncSettings
    from epfsdp2.rollout.transport.checksums import with_checksums
    from epfsdp2.rollout.transport.watched_sockets import WeightSyncError

    rank, world = dist.get_rank(), dist.get_world_size()
    for folder in folders:
        model, meshes = sharded_model(Path(folder), world, ep=world)
        dtypes = dict.fromkeys((name for name, _ in model.named_parameters()), torch.bfloat16)
        sync = RolloutSync(model, meshes, layer_names(model), dtypes, SyncSettings("sliced", 1 << 22, verify_syncs=-1))
        weights = sync.worker_weights("sliced", Rollout(world, block=BLOCK), rank, is_quantised=True)
        assert weights.has_checksums and weights.is_quantised_here

        def tensors(receive_buffers, weights=weights):
            for name, values in with_checksums(weights.tensors(receive_buffers)):
                if wrong and name.endswith("w2_weight_scale_inv/0,0,0"):
                    values = values * 2
                yield name, values

        try:
            asyncio.run(
                send_weights(
                    tensors,
                    zmq_handle=handles[rank],
                    bucket_megabytes=4,
                    use_shm=True,
                    timeout_seconds=120,
                    rank=rank,
                )
            )
        except WeightSyncError:
            assert wrong


def _synced(engine, folders, wrong=False):
    """What each worker then holds, by name."""
    calls = []
    for _ in folders:
        calls.append(
            engine.call(
                "update_weights_from_ipc",
                timeout=200.0,
                use_shm=True,
                sync_timeout_seconds=180.0,
                verify=True,
                is_quantised=True,
            )
        )
    handles = [engine.handle(rank) for rank in range(engine.tp_size)]
    run_ranks(_send, engine.tp_size, [str(folder) for folder in folders], handles, wrong, timeout=400)
    for call in calls:
        call.result()
    return engine.digests()


@pytest.mark.parametrize("tp", [1, 2])
def test_vllm_fp8_workers_after_syncs_hold_what_vllm_loads_of_a_quantised_checkpoint(start_engine, tmp_path, tp):
    first, second = (save_qwen3_moe(tmp_path / str(seed), seed, vocab_size=256, **SIZES) for seed in (1, 2))
    engine = start_engine(
        str(save_quantised(first, tmp_path / "quantised")),
        tp_size=tp,
        dtype="bfloat16",
        environment={"VERL_VLLM_FP8_QUANT_ENABLED": "1"},
    )
    loaded, generated = engine.digests(), engine.generate()
    assert any(digest.startswith("float8_e4m3fn[4, ") for digest in loaded[0].values())
    changed = _synced(engine, [second])
    assert [name for name in loaded[0] if changed[0][name] == loaded[0][name] and "norm" not in name] == []
    assert engine.generate() != generated
    assert _synced(engine, [first]) == loaded
    assert engine.generate() == generated
    with pytest.raises(RuntimeError, match="the received values of .*w2_weight_scale_inv/0,0,0 differ"):
        _synced(engine, [second], wrong=True)
    assert engine.leftovers() == []
