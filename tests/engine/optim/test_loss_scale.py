"""Training in float16: the loss is scaled, all ranks skip the same steps, and a run resumes the scale."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from epfsdp2.engine.optim import loss_scale
from epfsdp2.engine.optim.loss_scale import LossOverflowError, LossScale
from epfsdp2.engine.topology.dtensor import is_expert_parameter, local_tensor
from tests.support.engine.sharded import whole_gradients
from tests.support.models.tiny import reference_model, save_qwen3_moe
from tests.support.ranks import each_case, run_ranks
from tests.support.trainer.ppo import of_this_rank, ppo_batch, ppo_samples, ppo_worker, reference_update

START = 2.0**8  # gradients of such small models overflow at a run's initial scale
FEW = [
    {"ep": 2, "dispatch_chunks": 2, "activation_checkpointing": "full"},
    {"ep": 2, "ulysses_sequence_parallel_size": 2},
]
OTHERS = [
    {"ep": 2, "activation_checkpointing": "selective", "optimizer_offload": True, "param_offload": True},
    {"ep": 2, "offload_policy": True},
    {"ep": 1, "fsdp_size": 1},
]


def test_loss_scale_doubles_after_an_interval_and_halves_at_an_overflow():
    scale = LossScale(nn.Linear(1, 1), [], growth_interval=3)
    seen = []
    for finite in (True, True, False, True, True, True, True):
        scale.update(finite)
        seen.append(scale.value)
    assert seen == [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**16, 2.0**16]
    assert scale.scale(torch.tensor(0.5)).item() == 2.0**15


def _values(worker):
    """Return this rank's parameters and optimizer state, by name."""
    engine = worker.engine
    state = {n: local_tensor(p.detach()).clone() for n, p in engine.module.named_parameters()}
    for name, entries in engine.optimizer.state_dict()["state"].items():
        state |= {f"{name}.{key}": local_tensor(v).clone() for key, v in entries.items() if isinstance(v, torch.Tensor)}
    return state


def _equal(some, others):
    return some.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in some.items())


def _half(folder, ep=2, fsdp_size=-1, **settings):
    """Return a worker that computes in float16."""
    precision = {"param_dtype": "fp16", "reduce_dtype": "fp32"}
    worker = ppo_worker(folder, ep, fsdp_size, mixed_precision=precision, **settings)
    assert worker.engine.scaler.value == 2.0**16
    worker.engine.scaler.value = START
    return worker


def _scaled(worker):
    engine = worker.engine
    engine.scaler = engine.clipped_step.loss_scale = LossScale(engine.module, engine.layer_names)
    return worker


def _is_exact(folder):
    """In float32 a scaled loss gives the same updates bit for bit."""
    plain, scaled = ppo_worker(folder, 2), _scaled(ppo_worker(folder, 2))
    for worker in (plain, scaled):
        worker.engine.clipped_step.max_norm = 0.1  # below the norm
        for _ in range(2):
            worker.train_batch(ppo_batch(of_this_rank(worker, ppo_samples())))
    assert _equal(_values(plain), _values(scaled))
    assert scaled.engine.scaler.value == 2.0**16


def _close_to_float32(folder, cases):
    """Without unscaling, gradients or norm are wrong by 2^8; bfloat16 has eight times the error of float16."""
    from verl.utils import tensordict_utils as tu

    samples, reference = ppo_samples(), reference_model(folder)
    reference_update(reference, samples)
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    norm = torch.stack([grad.square().sum() for grad in wanted.values()]).sum().sqrt().item()
    for settings in cases:
        worker = _half(folder, **settings)
        seen, step = {}, worker.engine.optimizer.step
        worker.engine.optimizer.step = lambda *a, seen=seen, worker=worker, step=step: (
            seen.update({name: grad.cpu() for name, grad in whole_gradients(worker.engine.module).items()}),
            step(*a),
        )
        output = worker.train_batch(ppo_batch(of_this_rank(worker, samples)))
        assert worker.engine.clipped_step.skipped == 0, settings
        for name, want in wanted.items():
            assert (seen[name] - want).norm() < 2e-2 * want.norm(), (settings, name)
        if worker.engine.is_mp_src_rank_with_outputs():
            metrics = tu.get(output, "metrics")
            assert torch.tensor(metrics["loss_scale"]).unique().tolist() == [START]
            assert abs(metrics["grad_norm"] / norm - 1) < 1e-2, settings


@pytest.mark.long
def test_update_in_float16_with_other_settings_has_the_gradients_of_float32_to_its_precision(tmp_path):
    run_ranks(_close_to_float32, 2, save_qwen3_moe(tmp_path), OTHERS)


def _overflows(engine, rank):
    """Make an element of one expert's gradient infinite on one rank before the step."""
    step = engine.optimizer_step

    def broken():
        if dist.get_rank() == rank:
            gradient = next(p.grad for p in engine.module.parameters() if is_expert_parameter(p))
            local_tensor(gradient).view(-1)[0] = float("inf")
        return step()

    engine.optimizer_step = broken


def _skips_everywhere(folder):
    """An overflow in one expert of one rank skips the step of all optimizers on all ranks."""
    worker = _half(folder)
    batch = of_this_rank(worker, ppo_samples())
    worker.train_batch(ppo_batch(batch))
    before = _values(worker)
    step = worker.engine.optimizer_step
    _overflows(worker.engine, rank=1)
    worker.train_batch(ppo_batch(batch))
    assert _equal(before, _values(worker))
    assert worker.engine.clipped_step.skipped == 1 and worker.engine.scaler.value == START / 2
    worker.engine.optimizer_step = step
    worker.train_batch(ppo_batch(batch))
    assert not _equal(before, _values(worker)) and worker.engine.clipped_step.skipped == 1


def _ends(folder):
    """Activations beyond float16 raise with the layer's name."""
    worker = _half(folder)
    with torch.no_grad():
        local_tensor(worker.engine.module.model.layers[1].mlp.down_proj.weight).fill_(6e4)
    batch = of_this_rank(worker, ppo_samples())
    with mock.patch.object(loss_scale, "_MOST_SKIPPED", 4):
        for _ in range(3):
            worker.train_batch(ppo_batch(batch))
        said = r"4 steps in a row.*2\^4; the output of model.layers.1 is not finite"
        with pytest.raises(LossOverflowError, match=said):
            worker.train_batch(ppo_batch(batch))


def _resumes(folder, out):
    """The scale and its counter, on another mesh."""
    worker = _half(folder)
    batch = of_this_rank(worker, ppo_samples())
    _overflows(worker.engine, rank=0)
    worker.train_batch(ppo_batch(batch))
    del worker.engine.optimizer_step
    worker.train_batch(ppo_batch(batch))
    worker.save_checkpoint(str(out), global_step=2)
    resumed = _half(folder, 1, 1)
    resumed.load_checkpoint(str(out))
    state = resumed.engine.scaler.state_dict()
    assert state == worker.engine.scaler.state_dict() == {"value": START / 2, "good": 1}
    # A run in float32 resumes from it too.
    ppo_worker(folder, 1).load_checkpoint(str(out))


def _each_check(checks):
    each_case(checks, lambda check, *args: check(*args))


def test_training_in_float16_is_scaled_exactly_skips_overflows_on_all_ranks_and_resumes(tmp_path):
    folder = save_qwen3_moe(tmp_path / "model")
    checks = [(check, folder) for check in (_is_exact, _skips_everywhere, _ends)]
    checks += [(_close_to_float32, folder, FEW), (_resumes, folder, tmp_path / "saved")]
    run_ranks(_each_check, 2, checks)
