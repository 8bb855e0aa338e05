"""Shards under checkpoint names assemble to the checkpoint, and their deltas are its changes."""

import sys
import types

import torch
import torch.distributed as dist
from verl.workers.engine.spec import derive_dtensor_placement
from verl.workers.engine.utils import _hf_entry_identity, hf_delta_export, prime_delta_snapshots

from epfsdp2.engine.integration.delta_shards import ExpertsSpec, ShardExport, experts_entry
from epfsdp2.engine.topology.dtensor import local_ranges, local_tensor
from tests.support.engine.sharded import sharded_model
from tests.support.models.published import stored_values
from tests.support.models.tiny import save_glm4_moe, save_qwen3_moe
from tests.support.ranks import run_ranks

WORLD = 4
# ep, fsdp_size, expert_shard_dim: experts sharded in two dims, over ep alone, in replicas, twice along dim 0.
MESHES = [(2, -1, 1), (4, -1, 1), (2, 2, 1), (2, -1, 0)]


def _checkpoint(folder, dtype=None):
    tensors = stored_values(folder)
    return {name: t.to(dtype) if dtype is not None and t.is_floating_point() else t for name, t in tensors.items()}


def _assembled(export):
    """Assemble the checkpoint on rank 0 from verl's description of the shards."""
    whole, order = {}, []
    for name, values, spec in export.shards():
        order.append(name)
        if spec.place is None:
            place, contributes, group = derive_dtensor_placement(spec)
            assert (place, group) == (0, None)
            whole[name] = values.view(spec.full_shape)
            continue
        blocks = [None] * WORLD
        dist.all_gather_object(blocks, (values, spec.place, spec.contributes))
        full = torch.full(spec.full_shape, float("nan"), dtype=values.dtype)
        for block, place, contributes in blocks:
            if contributes:
                corner = tuple(slice(o, o + n) for o, n in zip(place.global_offset, place.local_shape, strict=True))
                assert full[corner].isnan().all()
                full[corner] = block.view(place.local_shape)
        if spec.to_hf_chunk is None:
            whole[name] = full
            continue
        slots = spec.to_hf_chunk(0, full[:3]) + spec.to_hf_chunk(3, full[3:])
        assert [(own, tuple(values.shape)) for own, values in slots] == spec.hf_slots
        whole |= dict(slots)
    orders = [None] * WORLD
    dist.all_gather_object(orders, order)
    assert all(other == order for other in orders)
    return whole


def _shards(meshes_of):
    for folder, meshes in meshes_of.items():
        for ep, fsdp_size, dim in meshes:
            model, built = sharded_model(folder, WORLD, ep, fsdp_size, expert_shard_dim=dim)
            for dtype in (torch.float32, torch.bfloat16):
                whole, wanted = _assembled(ShardExport(model, built, dtype)), _checkpoint(folder, dtype)
                assert whole.keys() == wanted.keys()
                assert all(torch.equal(whole[name], wanted[name]) for name in wanted), (folder, ep, fsdp_size, dim)


def _entry(name, spec, place, lidx, lval):
    if isinstance(spec, ExpertsSpec):
        return experts_entry(spec, lidx, lval)
    return _hf_entry_identity(name, spec, place, lidx, lval)


def _verls_backend():
    """verl's delta engine. Only its import needs cupy; it sends with CUDA."""
    sys.modules.setdefault("cupy", types.ModuleType("cupy"))
    sys.modules["cupy"].ndarray = object
    from verl.checkpoint_engine import delta_checkpoint_engine

    return delta_checkpoint_engine


def _deltas(folder):
    backend, seen = _verls_backend(), _checkpoint(folder, torch.bfloat16)
    for ep, fsdp_size, dim in MESHES[0], MESHES[2]:
        model, meshes = sharded_model(folder, WORLD, ep, fsdp_size, expert_shard_dim=dim)
        export, snapshots, held = ShardExport(model, meshes), {}, {name: t.clone() for name, t in seen.items()}
        prime_delta_snapshots(export.shards(), snapshots, pin=False)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for param in model.parameters():
                    # All ranks draw the same whole tensor and apply their shards, so that replicas stay equal.
                    changed = torch.rand(param.shape, generator=generator) < (0.05 if step else 0.5)
                    local_tensor(param).add_(changed.float()[local_ranges(param)[0].slices])
            wanted = _assembled(export)
            counted, pieces = torch.zeros(1), []

            def consume(name, dtype, shape, numel, positions, values, pieces=pieces):
                pieces.append(backend._FlushPiece(name, dtype, list(shape), positions, values))

            queue = backend._GatherQueue(7, 1 << 12, dist.get_rank() == 0, consume)
            for slots, dtype, counts, positions, values, group in hf_delta_export(export.shards(), snapshots, _entry):
                assert [len(slots), sum(counts).item()] == [len(counts), len(positions)] and dtype == "bfloat16"
                counted += len(positions)
                queue.put(group, slots, dtype, counts, positions, values)
            queue.flush_all()
            dist.all_reduce(counted)
            if dist.get_rank() == 0:
                different = sum(int((held[name] != wanted[name]).sum()) for name in wanted)
                assert counted.item() == sum(len(p.idx) for p in pieces) == different > 0
                _apply(_flush(backend, pieces), held)
                assert all(torch.equal(held[name], wanted[name]) for name in wanted), (ep, fsdp_size, dim, step)


def _flush(backend, pieces):
    """Assemble the entries as rank 0 does before it sends them."""
    engine = backend.DeltaShardedCheckpointEngine.__new__(backend.DeltaShardedCheckpointEngine)
    engine.encoding, engine.rollout_dtype = "indices", torch.bfloat16
    return engine._assemble_flush(pieces)


def _apply(flush, held):
    """Apply a flush like verl's consumer (``decode_delta_payload``, whose import needs vLLM's patch interface)."""
    from verl.checkpoint_engine.delta_sync import checksum

    assert checksum(flush.positions_cpu, flush.values_gpu) == flush.checksum
    for param in flush.params:
        assert list(held[param.name].shape) == param.shape
        positions = flush.positions_cpu[param.pos_start : param.pos_end].view(torch.int32).long()
        assert positions.unique().numel() == positions.numel()
        held[param.name].view(-1)[positions] = flush.values_gpu[param.val_start : param.val_end]


def _shards_and_deltas(meshes_of, folder):
    _shards(meshes_of)
    _deltas(folder)


def test_shard_export_of_all_ranks_is_the_checkpoint_and_its_deltas_are_the_changes(tmp_path):
    """A tied parameter is there once."""
    plain, tied = save_qwen3_moe(tmp_path / "qwen3"), save_qwen3_moe(tmp_path / "tied", tie_word_embeddings=True)
    others = {save_glm4_moe(tmp_path / "glm4"): MESHES[:1], tied: MESHES[:1]}
    run_ranks(_shards_and_deltas, WORLD, {plain: MESHES, **others}, plain)
