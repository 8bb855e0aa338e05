"""The layout that ``layout/vllm_layout.py`` computes is the one that vLLM's own loaders make."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.topology.dtensor import checkpoint_tensors
from epfsdp2.engine.topology.index_ranges import IndexRange
from epfsdp2.rollout.layout.vllm_layout import Heads, Need, Rollout, Tensor, known_families, needs
from epfsdp2.rollout.vllm.loader_trace import Recorder, View, checkpoint_views, joined
from tests.rollout.families import DENSE, FAMILIES, config_of, model_on_meta
from tests.rollout.served_families import SERVED
from tests.support.ranks import run_ranks

_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def _compare(folder, cases):
    """Each case is a family, what its config has otherwise, and whether vLLM spreads whole experts."""
    os.environ.update(_ENVIRONMENT, VLLM_DIST_IDENT=folder.replace("/", "."))
    # Before vLLM is imported, which changes some of transformers' classes (Dots1Model).
    models = [model_on_meta(config_of(family, **sizes)) for family, sizes, _ in cases]
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs

    rank, world = dist.get_rank(), dist.get_world_size()
    differing = []
    for index, (model, (family, sizes, expert_parallel)) in enumerate(zip(models, cases, strict=True)):
        model.config.architectures = [type(model).__name__]
        where = Path(folder) / f"{rank}-{index}"
        model.config.save_pretrained(where)
        engine = EngineArgs(
            model=str(where),
            dtype="float32",
            tensor_parallel_size=world,
            enable_expert_parallel=expert_parallel,
            skip_tokenizer_init=True,
            enforce_eager=True,
            distributed_executor_backend="mp",
        ).create_engine_config()
        with set_current_vllm_config(engine):
            init_distributed_environment(world, rank, "env://", rank, "gloo")
            ensure_model_parallel_initialized(world, 1)
            recorded = _record(engine, model)
        rollout, heads = Rollout(world, expert_parallel=expert_parallel), Heads.of(model.config)
        for tensor in _tensors(model):
            computed = joined(needs(tensor, rollout, rank, heads))
            if computed != recorded.get(tensor.name, []):
                differing.append((family, sizes, expert_parallel, rank, computed, recorded.get(tensor.name)))
    destroy_model_parallel()
    assert not differing, "\n".join(map(str, differing[:10]))


def _tensors(model) -> list[Tensor]:
    state = checkpoint_tensors(model)
    return [Tensor(name, tuple(t.shape), t.element_size()) for name, t in state.items()]


def _record(engine, model):
    from vllm.model_executor.model_loader.utils import initialize_model

    theirs = initialize_model(engine)
    held = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    held = {name.replace(".routed_experts", ""): tensor for name, tensor in held.items()}
    with torch.no_grad(), Recorder(checkpoint_views(model, _tensors(model)), held) as recorder:
        theirs.load_weights(recorder.weights())
    return recorder.needs()


def _cases(family: str) -> list:
    """Cut by two; with one key-value head on both; with whole experts, of which one worker has more, or none."""
    if family in DENSE:
        tied = {"tie_word_embeddings": True, "attention_bias": family == "llama"}  # vLLM's Qwen3 has none at o_proj
        return [(family, {}, False), (family, {"num_key_value_heads": 1}, False), (family, tied, False)]
    counts = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    experts = next(name for name in counts if name in SERVED[family].family.sizes)
    return [
        (family, {}, False),
        (family, {"num_key_value_heads": 1}, False),
        (family, {"tie_word_embeddings": True, experts: 9}, True),
    ]


# In this order: one with experts has to come first, as vLLM makes their groups for the first model of a process.
_KNOWN = [family for family in FAMILIES if family in known_families()]


def test_every_family_on_two_workers(tmp_path):
    run_ranks(_compare, 2, str(tmp_path), [case for family in _KNOWN for case in _cases(family)])


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 4])
def test_every_family_on_one_worker_and_on_four(tmp_path, world):
    modes = [(family, whole) for family in _KNOWN for whole in (False, world > 1)]
    cases = [(family, {}, whole) for family, whole in modes if not (whole and family in DENSE)]
    run_ranks(_compare, world, str(tmp_path), cases)


def test_every_family_that_is_said_to_be_known_is_here():
    assert FAMILIES.keys() >= known_families()


def _recorded(view, place, shape=(6, 4), parameter=(6, 4)):
    """What is recorded of a loader that copies ``view`` of a tensor to ``place`` in a parameter."""
    target = torch.zeros(parameter)
    with Recorder([View("a", "t", shape, shape, (shape[1], 1), 0)], {"p": target}) as recorder:
        ((_, tensor),) = recorder.weights()
        place(target.data).copy_(view(tensor))
    assert not target.any()
    return recorder.needs()


def test_views_of_views_are_followed():
    box = IndexRange((3, 1), (5, 3))
    assert _recorded(lambda t: t.chunk(2)[1][:2].narrow(1, 1, 2), lambda p: p[1:3, 2:]) == {
        "t": [Need(box, "p", (1, 2))]
    }


def test_neighbouring_boxes_are_one():
    needs = [Need(IndexRange((e, 0, f), (e + 1, 4, f + 2)), "p", (e - 2, 0, f)) for e in range(2, 5) for f in (0, 2)]
    assert joined(needs) == [Need(IndexRange((2, 0, 0), (5, 4, 4)), "p", (0, 0, 0))]
    elsewhere = Need(IndexRange((5, 0, 0), (6, 4, 4)), "p", (7, 0, 0))
    assert joined([*needs, elsewhere]) == [*joined(needs), elsewhere]


@pytest.mark.parametrize(
    ("view", "place", "words"),
    [
        (lambda t: t[:4].t(), lambda p: p[:4], "turns dims of t"),
        (lambda t: t[::2], lambda p: p[:3], "no box"),
        (lambda t: t.clone(), lambda p: p, "that it has made"),
        (lambda t: t, lambda p: p.clone(), "no parameter"),
    ],
)
def test_a_loader_that_does_more_than_copy_boxes_is_not_recorded(view, place, words):
    with pytest.raises(ValueError, match=words):
        _recorded(view, place)
