"""DeepSeek-V4 on ranks of which one has no sequence as long as a window of compressed keys."""

import torch
import torch.distributed as dist

from epfsdp2.engine.packing.sequences import PackedSequences
from tests.parity.families import ALL
from tests.support.engine.rows import SIZES, loss, one_by_one, packed, row
from tests.support.engine.sharded import sharded_model, whole_gradients
from tests.support.models.tiny import reference_model, relative_error, save_random
from tests.support.ranks import run_ranks

ROWS = [(2, 1, 1), (14, 2)]


def _update(folder, dtype, rows):
    model, _ = sharded_model(folder, 2, ep=2, attention="eager", before=PackedSequences, param_dtype=dtype)
    ids, targets = row(rows[dist.get_rank()])
    loss(packed(model, ids), targets).backward()
    return whole_gradients(model)


def _updates(folder):
    found, model = _update(folder, torch.float32, ROWS), reference_model(folder, "eager")
    both = [one_by_one(model, lengths)[1] for lengths in ROWS]
    assert {name for name, grad in found.items() if grad is not None} == set().union(*both)
    for name, other in both[1].items():
        wanted = (other + both[0].get(name, 0)) / 2  # FSDP takes the mean
        assert relative_error(found[name], wanted) < 1e-5, name
    # In bfloat16 the norm of compressed keys is an FSDP unit in float32, which ranks gather by calls.
    _update(folder, torch.bfloat16, ROWS)
    short = _update(folder, torch.float32, ROWS[:1] * 2)
    assert all(short[name].norm() == 0 for name in both[1].keys() - both[0].keys())


def test_update_of_short_sequences_on_one_rank_equals_the_plain_model(tmp_path):
    model = ALL["deepseek_v4"].build("eager", **SIZES["deepseek_v4"])
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # experts by token
            tokens, each = buffer.shape
            buffer.copy_((torch.arange(tokens)[:, None] + torch.arange(each)) % 8)
    save_random(model, tmp_path, 0)
    run_ranks(_updates, 2, tmp_path, timeout=120)
