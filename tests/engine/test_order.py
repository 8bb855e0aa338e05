"""The order of collectives and compute in a step, on ranks whose routing differs."""

import torch
import torch.distributed as dist

from tests.support.engine.recorder import Recorder
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import VOCAB, save_qwen3_moe, token_loss
from tests.support.ranks import each_case, run_ranks

WORLD, LAYERS = 4, 4


def _step(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, VOCAB, (1, 5 + 7 * rank), generator=generator)
    token_loss(model, ids).backward()


def _recorded(folder, options, depth):
    rank = dist.get_rank()
    model, _ = sharded_model(folder, WORLD, 2, prefetch_depth=depth, **options)
    model.train()
    recorder = Recorder(model)
    with recorder:
        for step in range(2):
            _step(model, rank, step)
    everyone = [None] * WORLD
    dist.all_gather_object(everyone, recorder.events)
    assert all(events == everyone[0] for events in everyone), "ranks issued different sequences"
    return recorder.events[len(recorder.events) // 2 :]


def _gathers_run_ahead(folder, options, depth):
    events = _recorded(folder, options, depth)
    recomputes = options.get("checkpointing") == "full"
    first_backward = events.index(("backward", f"experts {LAYERS - 1}"))
    turn = max(i for i, e in enumerate(events) if e[0] == "forward") + 1
    assert turn <= first_backward
    forward, backward = events[:turn], events[turn:]
    for i in range(LAYERS):
        ahead = [f"layers.{j}{part}" for j in range(i + 1, min(i + 1 + depth, LAYERS)) for part in ("", ".experts")]
        ahead += ["lm_head"] if i + depth >= LAYERS else []
        for name in ahead:
            assert forward.index(("gather", name)) < forward.index(("forward", f"experts {i}")), (i, name)
        ahead = [f"layers.{j}{part}" for j in range(max(i - depth, 0), i) for part in ("", ".experts")]
        start = ("recompute" if recomputes and i < LAYERS - 1 else "backward", f"experts {i}")
        for name in ahead:
            assert backward.index(("gather", name)) < backward.index(start), (i, name)
    # Not further ahead than asked for: that is memory.
    beyond = ("gather", f"layers.{1 + depth}.experts")
    assert forward.index(beyond) > forward.index(("forward", "experts 0"))
    # The embeddings' gradient reads no weight.
    assert ("gather", "embed_tokens") in forward and ("gather", "embed_tokens") not in backward
    # The three all-to-alls of an experts module's backward come before its reduction.
    for i in range(LAYERS):
        start, end = backward.index(("backward", f"experts {i}")), backward.index(("reduce", f"layers.{i}.experts"))
        assert backward[start:end].count(("all-to-all", torch.float32)) >= 3


def _prefetches(folder):
    cases = [({}, 1), ({"checkpointing": "full"}, 2)]
    each_case(cases, lambda options, depth: _gathers_run_ahead(folder, options, depth))
    events = _recorded(folder, {}, 0)
    for i in range(LAYERS - 1):
        assert events.index(("gather", f"layers.{i + 1}.experts")) > events.index(("forward", f"experts {i}"))
    # Experts that are not resharded stay gathered, and with selective checkpointing they are not recomputed.
    events = _recorded(folder, {"reshard_experts_after_forward": False, "checkpointing": "selective"}, 1)
    turn = max(i for i, e in enumerate(events) if e[0] == "forward") + 1
    gathered = {name for what, name in events[turn:] if what == "gather"}
    assert gathered == {f"layers.{i}" for i in range(LAYERS)}
    assert not any(what == "recompute" for what, _ in events)
    # Rows four times, their routing weights twice.
    assert sum(e == ("all-to-all", torch.float32) for e in events) == 6 * LAYERS


def test_prefetch_gathers_as_many_layers_as_asked_before_this_layers_experts_compute(tmp_path):
    run_ranks(_prefetches, WORLD, save_qwen3_moe(tmp_path, num_hidden_layers=LAYERS, mlp_only_layers=[]))
