"""Between verl's phases a rank holds its shards, their moments after the first step, and nothing else."""

import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import ppo_batch, ppo_samples, ppo_worker


def _held() -> int:
    """Bytes of all tensors that Python knows of."""
    gc.collect()
    storages = {}
    for entry in gc.get_objects():
        if type(entry) in (torch.Tensor, torch.nn.Parameter) and entry.device.type == "cpu" and not entry.is_nested:
            storage = entry.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _phases(folder, reshard):
    from verl.utils import tensordict_utils as tu

    mine = ppo_samples()[4 * dist.get_rank() :][:4]
    worker = ppo_worker(folder, 2, reshard_after_forward=reshard)
    params = list(worker.engine.module.parameters())
    shards = sum(p.to_local().nbytes for p in params if isinstance(p, DTensor))
    dense = sum(p.to_local().nbytes for p in params if isinstance(p, DTensor) and p.device_mesh.ndim == 1)
    little = 0.05 * shards
    inside = []
    worker.engine.module.register_forward_hook(lambda *_: inside.append(_held()))

    def evaluate():
        infer = ppo_batch(mine)
        tu.assign_non_tensor(infer, compute_loss=False)
        worker.infer_batch(infer)

    evaluate()  # allocates cached tensors: position embeddings, and the routes of a sync
    list(worker.engine.get_per_tensor_param()[0])
    before = min(_held(), _held())

    def holds(wanted):
        for _ in range(5):  # gloo's threads release a collective's tensors a moment after it has ended
            held = _held() - before
            if abs(held - wanted) < little:
                return
            time.sleep(0.1)
        raise AssertionError(f"{held} bytes more than before, not {wanted}")

    inside.clear()
    evaluate()
    # The root stays gathered after a forward. Without reshard_after_forward the rest does too, except experts, which
    # are not gathered.
    assert max(inside) - before > (little if reshard else dense)
    holds(0)
    for _ in range(2):
        worker.train_batch(ppo_batch(mine))
        holds(2 * shards)
    evaluate()
    holds(2 * shards)
    list(worker.engine.get_per_tensor_param()[0])
    holds(2 * shards)


@pytest.mark.parametrize("reshard", [pytest.param(True, marks=pytest.mark.long), False])
def test_gathered_parameters_after_each_phase_are_freed(tmp_path, reshard):
    run_ranks(_phases, 2, save_qwen3_moe(tmp_path), reshard)
