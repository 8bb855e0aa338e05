"""Updates attend to the keys that indexers chose for the old log-probs."""

import contextlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.model.families import LOOPING_INDEXERS
from epfsdp2.engine.model.layers import set_mtp
from epfsdp2.engine.moe.router.replay import ReplayError
from epfsdp2.engine.packing.indexer_replay import IndexerReplay, _pack, _unpack, indexers_of
from epfsdp2.engine.packing.sequences import PackedSequences
from epfsdp2.engine.packing.shared_mixers import Piece
from tests.parity.families import ALL, CHOOSING, save
from tests.parity.float64 import float64
from tests.support.engine.rows import IN_FLOAT64, SIZES, errors, one_by_one, packed, row, shared
from tests.support.models.tiny import relative_error
from tests.support.ranks import each_case, run_ranks
from tests.support.trainer.ppo import PADDED, infer, of_this_rank, ppo_batch, ppo_samples, ppo_worker

EXACT = 1e-6  # in float64, see test_shared_mixers.py
LONG = ((3, 1, 26, 2), "full")  # ranks that share the row have parts of a sequence
UNEVEN = ((11, 1, 14, 6), "none")  # they have whole sequences
ONE_QUERY = ((7, 25), "selective")  # on four ranks, the first has one token of the second sequence


def _model(name, changed=False):
    """A model, or one whose indexers choose other keys."""
    model = ALL[name].build_random("eager" if name == "glm_moe_dsa" else ALL[name].attention, **SIZES.get(name, {}))
    generator = torch.Generator().manual_seed(5)
    for param in (p for indexer in _indexers(model) for p in indexer.parameters() if changed):
        param.data += torch.randn(param.shape, generator=generator)
    return model


def _indexers(model):
    return indexers_of(model).values()


def _has_replay(name):
    kinds = {type(indexer).__name__ for indexer in (_indexers(_model(name)) if name in ALL else ())}
    return bool(kinds) and not kinds & LOOPING_INDEXERS


def _spans(lengths):
    return [(sum(lengths[:place]), sum(lengths[: place + 1])) for place in range(len(lengths))]


def _wanted(name, lengths):
    """The changed model where its indexers return what those of the other one returned, one sequence at a time."""
    model, changed, chosen = _model(name), _model(name, changed=True), []
    for indexer in _indexers(model):
        indexer.register_forward_hook(lambda *call: chosen.append(call[-1]))
    one_by_one(model, lengths)
    own = one_by_one(changed, lengths)
    for indexer in _indexers(changed):
        indexer.register_forward_hook(lambda *_: chosen.pop(0))
    wanted = one_by_one(changed, lengths)
    assert not chosen and relative_error(own[0], wanted[0]) > 1e-4
    return wanted


def _replayed(name, lengths, how):
    with float64() if name in IN_FLOAT64 else contextlib.nullcontext():
        wanted, spans, group, replays = _wanted(name, lengths), _spans(lengths), dist.group.WORLD, []

        def attach(model, rows):
            replays.append(IndexerReplay(model, rows, group))
            replays[-1].replay(keys) if keys else replays[-1].record(spans)

        keys = {}
        shared(_model(name), group, lengths, attach=attach)
        keys = dict(zip(spans, replays[0].recorded(torch.device("cpu")), strict=True))
        found = errors(_model(name, changed=True), group, wanted, lengths, checkpointing=how, attach=attach)
        assert {fqn: error for fqn, error in found.items() if error > EXACT} == {}
        assert replays[1].differing.take(group) > 0.1
        # The keys are those of a model without shared rows.
        model, (ids, _) = _model(name), row(lengths)
        alone = IndexerReplay(model, PackedSequences(model))
        alone.record(spans)
        packed(model, ids)
        assert all(torch.equal(keys[span], own) for span, own in zip(spans, alone.recorded("cpu"), strict=True))
        if name == "glm_moe_dsa":  # it chooses all of 4 keys
            assert all((len(own) == 0) == (end - start <= 4) for (start, end), own in keys.items())
        alone.replay(keys)
        packed(model, ids)
        assert alone.differing.take() == 0.0


def _families(cases):
    each_case(cases, _replayed)


@pytest.mark.parametrize("world", [2, 4])
def test_indexer_replay_of_shared_rows_equals_the_plain_model_with_those_keys(world):
    rows = {
        2: (("glm_moe_dsa", UNEVEN), ("glm_moe_dsa", LONG), ("deepseek_v4", LONG)),
        4: (("deepseek_v4", ONE_QUERY),),
    }
    run_ranks(_families, world, [(name, *how) for name, how in rows[world]])


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_indexer_replay_of_every_family_equals_the_plain_model_with_those_keys(world):
    cases = [(name, *how) for name in CHOOSING if _has_replay(name) for how in (UNEVEN, LONG, ONE_QUERY)]
    run_ranks(_families, world, cases, timeout=900)


def _updates(folder):
    """The first of two updates chooses the keys of the log-probs by itself, the second one would choose others."""
    from verl.utils import tensordict_utils as tu

    samples, keys = ppo_samples(), []
    model = {"override_config": {"attn_implementation": "eager"}}
    how = {"dynamic": True, "activation_checkpointing": "full", "indexer_replay": True, "model": model}
    for size in (1, 2):
        worker = ppo_worker(folder, 2, ulysses_sequence_parallel_size=size, **how)
        output, found = infer(worker, of_this_rank(worker, samples)), [None] * 2
        dist.all_gather_object(found, None if output is None else list(tu.get(output, "indexer_keys").unbind()))
        keys.append([own for part in found if part is not None for own in part])
        for is_first in (True, False):
            batch = ppo_batch(of_this_rank(worker, samples))
            batch["indexer_keys"] = torch.nested.as_nested_tensor(of_this_rank(worker, keys[-1]), layout=torch.jagged)
            trained = worker.train_batch(batch)
            if trained is not None:
                (share, *_), *_ = tu.get(trained, "metrics")["indexer_replay_differing"]
                assert share == 0.0 if is_first else share > 0.0
        with pytest.raises(ReplayError, match="compute_log_prob has left no indexer_keys in the batch"):
            worker.train_batch(ppo_batch(of_this_rank(worker, samples)))
    assert all(torch.equal(alone, own) for alone, own in zip(*keys, strict=True)) and any(map(len, keys[0]))
    with pytest.raises(SettingError, match="use_remove_padding=False: keys are replayed along a packed row"):
        ppo_worker(folder, 2, indexer_replay=True, model=model | PADDED)


def test_indexer_replay_in_updates_takes_the_keys_of_the_log_probs(tmp_path):
    pytest.importorskip("verl")
    run_ranks(_updates, 2, save("glm_moe_dsa", tmp_path))


@pytest.mark.parametrize("keys", [1, 8, 21])
def test_bits_of_keys_are_those_that_were_packed(keys):
    chosen = torch.rand(2, 3, keys, generator=torch.Generator().manual_seed(0)) < 0.5
    assert _pack(chosen).shape == (2, 3, -(-keys // 8)) and torch.equal(_unpack(_pack(chosen), keys), chosen)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_keys_that_a_query_does_not_see_are_no_choice(dtype):
    model = _model("glm_moe_dsa")
    replay, piece = IndexerReplay(model, PackedSequences(model)), Piece((0, 4), (0, 4))
    scores = torch.ones(1, 4, 4).triu(1).mul(torch.finfo(dtype).min)
    then, now = torch.tensor([[[0, 3], [0, 1], [0, 1], [0, 1]], [[0, 1], [0, 1], [0, 2], [0, 3]]])[:, None]
    replay.record([piece.span])
    replay._record(0, piece, scores, then)
    replay.replay(dict(zip([piece.span], replay.recorded("cpu"), strict=True)))
    found = replay._replay(0, piece, scores, now)
    assert torch.equal(found.sort().values, then) and replay.differing.take() == 1.0  # of the last two queries


def test_indexers_are_those_of_the_policy_and_not_of_its_drafts():
    model = _model("glm_moe_dsa")
    first, *_, last = indexers_of(model)
    assert last == "model.layers.2.self_attn.indexer"
    set_mtp(model, ["model.layers.2"])
    assert first in indexers_of(model) and last not in indexers_of(model)


def test_indexer_replay_of_scores_of_an_unknown_shape_names_the_indexer():
    model = _model("glm_moe_dsa")
    name, indexer = next(iter(indexers_of(model).items()))
    indexer.forward = lambda *args, **kwargs: torch.randn(9).topk(2).indices
    replay = IndexerReplay(model, PackedSequences(model))
    replay.record([(0, 9)])
    with pytest.raises(ReplayError, match=rf"{name} chooses from scores \(9,\), not \[1, \(heads,\) queries, keys\]"):
        packed(model, row((9,))[0])


_QUEUE = """
import ray, torch, transfer_queue
from tensordict import TensorDict

ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
transfer_queue.init()
rows = [torch.arange(length, dtype=torch.uint8) for length in (3, 0, 7)]
fields = TensorDict({"indexer_keys": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=3)
transfer_queue.kv_batch_put(keys=["a", "b", "c"], partition_id="train", fields=fields)
found = transfer_queue.kv_batch_get(keys=["c", "b", "a"], partition_id="train", select_fields=["indexer_keys"])
print([row.tolist() for row in found["indexer_keys"].unbind()])
ray.shutdown()
"""


@pytest.mark.long
def test_keys_of_unequal_sequences_pass_through_the_queue_of_verls_trainer():
    pytest.importorskip("transfer_queue")
    done = subprocess.run([sys.executable, "-c", _QUEUE], capture_output=True, text=True, timeout=240)
    assert "[[0, 1, 2, 3, 4, 5, 6], [], [0, 1, 2]]" in done.stdout, done.stderr
