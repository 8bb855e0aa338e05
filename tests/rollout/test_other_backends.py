"""verl's other checkpoint backends with this engine, through verl's own worker on two ranks."""

import asyncio

import torch
import torch.distributed as dist

from tests.support.models.names import send_stacks
from tests.support.models.published import stored_values
from tests.support.models.tiny import reference_model, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.verl_worker import training_worker


def _worker(folder, **settings):
    from epfsdp2.engine.config import EPFSDP2EngineConfig

    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    engine = EPFSDP2EngineConfig(ep_size=2, mixed_precision=precision, rollout_sync="auto", **settings)
    return training_worker(folder, "language_model", engine, loss=None)


class _Broadcast:
    """Consumes the weights like nccl and similar backends, without their transport."""

    def __init__(self, bucket_size, is_master):
        self.bucket_size, self.is_master, self.sent = bucket_size, is_master, {}

    async def send_weights(self, weights):
        from verl.checkpoint_engine.base import merge_weight_chunks, split_weight_chunks

        if not self.is_master:
            for _ in weights:
                pass
            return
        chunks = split_weight_chunks(weights, self.bucket_size)
        async for name, tensor in merge_weight_chunks(chunks, self.bucket_size):
            self.sent[name] = tensor.clone()


def _full_and_deltas(folder):
    send_stacks()
    engine, whole = _worker(folder).engine, dict(reference_model(folder).named_parameters())
    for factor in (1, 2):
        weights, peft = engine.get_per_tensor_param()
        backend = _Broadcast(4096, is_master=dist.get_rank() == 0)
        asyncio.run(backend.send_weights(weights))
        assert peft is None
        if backend.is_master:
            assert backend.sent.keys() == whole.keys()
            assert all(torch.equal(backend.sent[name], whole[name] * factor) for name in whole)
        with torch.no_grad():
            for param in engine.module.parameters():
                param.mul_(2)

    # delta_sharded sends the changes since its snapshot.
    engine.prime_delta_snapshots()
    with torch.no_grad():
        engine.module.model.norm.weight.add_(1)
        engine.module.model.layers[0].mlp.experts.down_proj.mul_(2)
    entries, _ = engine.get_per_tensor_param_delta_shard()
    changed = {}
    for slots, dtype, counts, _, _, _ in entries:
        assert dtype == "bfloat16"
        for (name, shape), count in zip(slots, counts.tolist(), strict=True):
            changed[name] = (shape, count)
    saved = stored_values(folder)
    assert {name: shape for name, (shape, _) in changed.items()} == {n: tuple(t.shape) for n, t in saved.items()}
    here = torch.tensor([changed[name][1] for name in sorted(changed)])
    dist.all_reduce(here)
    for name, count in zip(sorted(changed), here.tolist(), strict=True):
        is_changed = name == "model.norm.weight" or ("layers.0.mlp.experts" in name and "down_proj" in name)
        assert count == (saved[name].numel() if is_changed else 0), name


def _by_the_names_of_checkpoints(folder):
    send_stacks()
    weights, _ = _worker(folder, _rollout="sglang").engine.get_per_tensor_param()
    saved, sent = stored_values(folder), dict(weights)
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)


def _both(folder):
    _full_and_deltas(folder)
    _by_the_names_of_checkpoints(folder)


def test_other_backends_get_full_tensors_by_names_of_the_model_or_checkpoint_and_delta_gets_changes(tmp_path):
    run_ranks(_both, 2, save_qwen3_moe(tmp_path))
