"""Updates whose forward gives the old log-probs, beside updates after verl's pass that computes them."""

import contextlib
import io
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.support.engine.sharded import whole_parameters
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import each_case, run_ranks
from tests.support.trainer.ppo import RESPONSE, SAMPLES, infer, of_this_rank, ppo_batch, ppo_samples, ppo_worker

UPDATES = 3
BF16 = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
GRPO = {"ppo_mini_batch_size": SAMPLES, "loss_agg_mode": "seq-mean-token-mean"}


def _actor(**settings):
    from epfsdp2.engine.config import EPFSDP2ActorConfig

    return EPFSDP2ActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=2, **settings)


def _worker(folder, skips, actor, engine, **flags):
    """An actor's worker, and the number of forwards that each of its calls has run."""
    from verl.workers.utils.losses import ppo_loss

    averaged = {"loss_agg_mode": actor.loss_agg_mode, "loss_scale_factor": actor.loss_scale_factor}
    facts = {"_one_update": {"sequences": actor.ppo_mini_batch_size, "averaged": averaged}} if skips else {}
    worker = ppo_worker(folder, **engine, **facts, **flags)
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    forwards = []
    worker.engine.module.register_forward_hook(lambda *_: forwards.append(1))
    return worker, forwards


def _noise(seed):
    return torch.randn(SAMPLES, RESPONSE, generator=torch.Generator().manual_seed(seed))


def _steps(worker, actor, forwards, updates=1, nested=False):
    """Run verl's calls of some steps: old log-probs, then updates; return the parameters, metrics and forwards."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import no_padding_2_padding

    samples, counts, metrics = ppo_samples(), [], []
    for step in range(UPDATES):
        part = partial(of_this_rank, worker)
        batch = ppo_batch(part(samples))
        batch["ref_log_prob"], batch["advantages"] = part(_noise(step)) - 2, part(_noise(9 + step))
        batch["rollout_log_probs"] = (part(_noise(20 + step)).abs() * -1) * batch["response_mask"]
        asked = batch.copy()
        tu.assign_non_tensor(asked, compute_loss=False, calculate_entropy=True)
        output = worker.infer_batch(asked)
        old, entropy = (no_padding_2_padding(tu.get(output, key), batch) for key in ("log_probs", "entropy"))
        metrics.append(_of_the_trainer(worker, actor, old, entropy, batch))
        batch["old_log_probs"] = old
        if nested:
            _nest(batch)
        counts.append(len(forwards))
        tu.assign_non_tensor(
            batch,
            calculate_entropy=bool(actor.entropy_coeff),
            global_batch_size=SAMPLES // updates,
            mini_batch_size=SAMPLES // updates,
            epochs=actor.ppo_epochs,
        )
        update = tu.get(worker.train_mini_batch(batch), "metrics")
        metrics[-1].update(_named(update))
        counts.append(len(forwards))
    return whole_parameters(worker.engine.module), metrics, counts


def _named(metrics):
    """Name and reduce an update's metrics as both of verl's trainers do."""
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import rename_dict

    return reduce_metrics(rename_dict(dict(metrics), "actor/"))


def _of_the_trainer(worker, actor, old, entropy, batch):
    """Compute the trainer's metrics of all ranks' old log-probs before the update (``ray_trainer.py``)."""
    from verl import DataProto
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.utils.debug.metrics import calculate_debug_metrics

    fields = {key: batch[key] for key in ("response_mask", "rollout_log_probs", "responses")}
    fields |= {"old_log_probs": old, "entropys": entropy}
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, fields, group=worker.engine.get_data_parallel_group())
    data = DataProto.from_dict({key: torch.cat([each[key] for each in everywhere]) for key in fields})
    averaged = {"loss_agg_mode": actor.loss_agg_mode, "loss_scale_factor": actor.loss_scale_factor}
    entropy = agg_loss(data.batch["entropys"], data.batch["response_mask"], **averaged).item()
    return {
        "actor/entropy": entropy,
        **calculate_debug_metrics(data),
        **compute_rollout_correction_and_add_to_batch(data, {})[1],
    }


def _nest(batch):
    """Make prompts and responses nested, as the v1 trainers have them."""
    from verl.utils import tensordict_utils as tu

    tu.pop(batch, "max_response_len")
    lengths = batch["response_mask"].sum(-1).tolist()
    befores = (batch["input_ids"].offsets().diff() - batch["response_mask"].sum(-1)).tolist()
    parts = {"prompts": [row[-before:] for row, before in zip(batch["prompts"], befores, strict=True)]}
    for key in ("responses", "response_mask", "old_log_probs", "advantages", "ref_log_prob", "rollout_log_probs"):
        parts[key] = [row[:length] for row, length in zip(batch[key], lengths, strict=True)]
    for key, rows in parts.items():
        batch[key] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _compare(folder, actor, engine, nested):
    """Parameters have the same bits with the pass and without it, and the metrics of verl's trainer their values.

    The pass has one sequence in a micro-batch, the update two.
    """
    actor, found, engine = _actor(**{**GRPO, **actor}), {}, {"batch_invariant": True, **engine}
    for skips in (False, True):
        worker, forwards = _worker(folder, skips, actor, {**engine, "infer_micro_batch": 1})
        found[skips] = _steps(worker, actor, forwards, nested=nested)
    micro_batches = SAMPLES // dist.get_world_size() // 2
    (wanted, metrics, every), (got, ours, fewer) = found[False], found[True]
    is_dynamic = engine.get("dynamic", False)
    assert every[-1] == (2 if is_dynamic else 3) * fewer[-1] and fewer[0] == 0, (every, fewer)
    assert is_dynamic or fewer[-1] == UPDATES * micro_batches
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    for step, (theirs, own) in enumerate(zip(metrics, ours, strict=True)):
        timed = {name for name in theirs | own if name.startswith(("perf/", "actor/perf", "actor/mfu"))}
        assert own.keys() - timed == theirs.keys() - timed
        for name in theirs.keys() - timed:
            assert own[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), (step, name)


CASES = [
    ({}, {}, False),
    ({"entropy_coeff": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.3}, BF16, True),
    ({"loss_agg_mode": "token-mean", "entropy_coeff": 0.05}, BF16, False),
    (
        {"policy_loss": {"loss_mode": "gspo"}, "use_kl_loss": True, "kl_loss_coef": 0.3},
        {"ep": 1, "dynamic": True},
        True,
    ),
    ({"loss_agg_mode": "token-mean"}, {"activation_checkpointing": "full", "param_offload": True}, True),
]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [CASES[i] for i in (1, 3, 4)]),
        *(pytest.param(world, CASES, marks=pytest.mark.long) for world in (1, 2)),
    ],
    ids=["few", "one rank", "two ranks"],
)
def test_updates_without_the_pass_for_old_log_probs_have_the_same_bits_and_metrics(tmp_path, world, cases):
    folder = save_qwen3_moe(tmp_path)
    cases = [(folder, actor, {**engine, "ep": world}, nested) for actor, engine, nested in cases]
    run_ranks(each_case, world, cases, _compare, timeout=400)


def _missing(output):
    from verl.utils import tensordict_utils as tu

    found = [tu.get(output, key).values().isnan() for key in ("log_probs", "entropy") if key in output]
    assert all(each.all() == each.any() == found[0].any() for each in found)
    return bool(found[0].any())


def _with_missing(samples):
    batch = ppo_batch(samples)
    batch["old_log_probs"] = batch["old_log_probs"].fill_(torch.nan)
    return batch


def _runs_the_pass(folder):
    """Other calls than that for old log-probs of a batch with one update have their forward."""
    mine = ppo_samples()[8 * dist.get_rank() :][:8]
    adapters = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    worker, forwards = _worker(folder, True, _actor(**GRPO), {"ep": 2}, model=adapters)
    # The reference policy has the actor's worker, and in verl 0.9.1 no entropies.
    calls = {
        "reference": partial(infer, worker, mine, no_lora_adapter=True),
        "no entropies": partial(infer, worker, mine, calculate_entropy=False),
        "loss": lambda: worker.infer_batch(ppo_batch(mine)),
        "another batch": partial(infer, worker, mine[:4]),
    }
    for name, call in calls.items():
        done = len(forwards)
        assert not _missing(call()) and len(forwards) > done, name
    done = len(forwards)
    assert _missing(infer(worker, mine)) and len(forwards) == done
    assert not _missing(infer(worker, mine, calculate_entropy=False))  # between the two, which changes nothing
    worker.train_batch(_with_missing(mine))
    for engine, model in (({"chunked_logits": False}, {}), ({}, {"attention_dropout": 0.5})):
        override = {"override_config": {"attn_implementation": "sdpa", **model}}
        worker, _ = _worker(folder, True, _actor(**GRPO), {"ep": 2, **engine}, model=override)
        assert not _missing(infer(worker, mine)), (engine, model)


def _prints_why(folder):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        _runs_the_pass(folder)
    lines = [line for line in out.getvalue().splitlines() if "old log-probs are computed" in line]
    reasons = [
        "[epfsdp2] old log-probs are computed: 8 sequences, and 16 in an update",
        "[epfsdp2] old log-probs are computed before updates: logits are whole",
        "[epfsdp2] old log-probs are computed before updates: a forward draws random numbers",
    ]
    assert lines == (reasons if dist.get_rank() == 0 else [])


def test_forwards_that_an_update_cannot_stand_for_are_computed(tmp_path):
    run_ranks(_prints_why, 2, save_qwen3_moe(tmp_path))


def _several_updates(folder):
    """A batch of two updates gets the parameters that it gets without the setting; a second epoch has no log-probs."""
    found = {}
    for skips in (False, True):
        actor = _actor(ppo_mini_batch_size=SAMPLES // 2)
        worker, forwards = _worker(folder, skips, actor, {"ep": 2})
        found[skips] = _steps(worker, actor, forwards, updates=2)
    (wanted, _, counts), (got, _, as_many) = found[False], found[True]
    assert counts == as_many and all(torch.equal(got[name], wanted[name]) for name in wanted)
    actor = _actor(**GRPO, ppo_epochs=2)
    worker, forwards = _worker(folder, True, actor, {"ep": 2})
    with pytest.raises(RuntimeError, match="old log-probs are NaN"):
        _steps(worker, actor, forwards)


def test_batch_of_several_updates_has_its_old_log_probs_computed(tmp_path):
    run_ranks(_several_updates, 2, save_qwen3_moe(tmp_path))
