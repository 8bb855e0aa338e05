"""One PPO update through verl's own TrainingWorker on 4 ranks against the plain model in one process."""

import gzip
import json
import threading
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.checkpoint.atomic_folder import MANIFEST
from epfsdp2.engine.fsdp import single_rank
from tests.support.engine.sharded import whole_parameters
from tests.support.models.names import send_stacks
from tests.support.models.tiny import reference_model, save_qwen3, save_qwen3_moe
from tests.support.ranks import each_case, run_ranks
from tests.support.trainer.ppo import (
    PADDED,
    check_ppo_updates,
    infer,
    plain_log_probs,
    ppo_batch,
    ppo_samples,
    ppo_worker,
    reference_update,
)

WORLD = 4
RELATIVE = 1e-5
WHOLE = {"chunked_logits": False}  # logits


def test_ppo_update_on_every_mesh_has_the_gradients_and_norm_of_the_plain_model(tmp_path):
    cases = [
        {"ep": 1, "use_no_sync_for_gradient_accumulation": True, "pad_to_length": True, "pad_to_length_bucket": 32},
        {"ep": 2, "fsdp_size": 2, "reshard_after_forward": False},
        {"ep": 2, "dynamic": True, "offload_policy": True, "model": PADDED},
        {"ep": 4, **WHOLE, "param_offload": True, "optimizer_offload": True, "entropy_checkpointing": True},
        {"ep": 2, **WHOLE, "entropy_from_logits_with_chunking": True, "entropy_from_logits_chunk_size": 8},
        {"ep": 4, "model": PADDED, **WHOLE, "dynamic": True, "entropy_checkpointing": True},
    ]
    run_ranks(check_ppo_updates, WORLD, save_qwen3_moe(tmp_path), cases, timeout=500)


def test_ppo_update_of_a_dense_model_equals_the_plain_model_beside_experts_and_refuses_ep_size_alone(tmp_path):
    """Beside a model with experts, settings of experts are for the other role."""
    role = {"ep": 8, "dispatch_chunks": 2, "expert_plan": {"model.layers.*.moe.w1": 0}, "_of_a_role": True}
    cases = [
        {**role, "fsdp_size": 2, "prefetch_depth": 2, "model": PADDED},
        {"ep": 1, "dynamic": True, "ulysses_sequence_parallel_size": 2, "activation_checkpointing": "selective"},
    ]
    run_ranks(_dense, WORLD, save_qwen3(tmp_path), cases, timeout=300)


def _dense(folder, cases):
    # A role alone, as in sft_trainer, which has no driver.
    with pytest.raises(Exception, match=r"engine.ep_size=2: concerns experts, and Qwen3ForCausalLM \(model.path\)"):
        ppo_worker(folder, 2)
    check_ppo_updates(folder, cases)


def _uneven(folder):
    """Give one rank the short sequences and one the long ones; the plain model has all."""
    from verl.utils import tensordict_utils as tu

    samples = sorted(ppo_samples(), key=lambda sample: len(sample[0]))
    mine = samples[8 * dist.get_rank() :][:8]
    tokens = [sum(len(ids) for ids, *_ in part) for part in (samples[:8], samples[8:])]
    assert -(-tokens[0] // 40) < -(-tokens[1] // 40)  # micro-batches that each rank needs by itself
    reference = reference_model(folder)
    reference_update(reference, samples)
    norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()]).item()
    worker, passes, everywhere = ppo_worker(folder, 2, dynamic=True), [], [None, None]
    worker.engine.module.register_forward_hook(lambda *_: passes.append(1))
    metrics = tu.get(worker.train_batch(ppo_batch(mine)), "metrics")
    dist.all_gather_object(everywhere, len(passes))
    assert everywhere[0] == everywhere[1] >= -(-tokens[1] // 40)
    assert abs(metrics["grad_norm"] / norm - 1) < RELATIVE


def test_ppo_update_with_fewer_samples_on_a_rank_takes_as_many_micro_batches_on_all(tmp_path):
    run_ranks(_uneven, 2, save_qwen3_moe(tmp_path))


def _reference_policy(folder, model):
    from verl.utils import tensordict_utils as tu

    worker = ppo_worker(folder, 2, forward_only=True, model=model)
    assert worker.engine.optimizer is None
    reference, mine = reference_model(folder), ppo_samples()[2 * dist.get_rank() :][:2]
    output = infer(worker, mine)
    for i, (ids, *_) in enumerate(mine):
        log_probs, entropy = plain_log_probs(reference, ids)
        torch.testing.assert_close(tu.get(output, "log_probs")[i][:-1], log_probs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(tu.get(output, "entropy")[i], entropy, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError):
        worker.train_batch(ppo_batch(mine))


def test_reference_policy_of_packed_or_padded_rows_is_forward_only(tmp_path):
    folder = save_qwen3_moe(tmp_path)
    run_ranks(each_case, 2, [(folder, {}), (folder, PADDED)], _reference_policy)


def _weights_after_evaluation(folder):
    """Sync every tensor after an evaluation, which without reshard_after_forward leaves all layers gathered."""
    send_stacks()
    worker = ppo_worker(folder, 2, reshard_after_forward=False)
    infer(worker, ppo_samples()[:2])
    weights, peft = worker.engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    wanted = dict(reference_model(folder).named_parameters())
    got = dict(weights)
    assert peft is None and got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_weights_out_after_an_evaluation_are_those_of_the_model(tmp_path):
    run_ranks(_weights_after_evaluation, 2, save_qwen3_moe(tmp_path))


def _saves_and_resumes(folder, out):
    """Resume in a worker whose weights and optimizer the caller moves to the device and back."""
    from verl.utils import tensordict_utils as tu

    mine = ppo_samples()[4 * dist.get_rank() :][:4]
    worker = ppo_worker(folder, 2, optimizer_offload=True)
    for step in (1, 2):
        worker.train_batch(ppo_batch(mine))
        worker.save_checkpoint(str(out / f"global_step_{step}"), global_step=step, max_ckpt_to_keep=1)
    dist.barrier()  # rank 0 deletes
    assert not (out / "global_step_1").exists()
    after = worker.train_batch(ppo_batch(mine))

    resumed = ppo_worker(folder, 1, param_offload=True, optimizer_offload=True)
    resumed.load_checkpoint(str(out / "global_step_2"))
    resumed.to("device")
    batch = ppo_batch(mine)
    tu.assign_non_tensor(batch, disable_auto_offload=True)
    again = resumed.train_batch(batch)
    resumed.to("cpu")
    norms = [tu.get(output, "metrics")["grad_norm"] for output in (after, again)]
    assert abs(norms[1] / norms[0] - 1) < 1e-5
    ours, theirs = whole_parameters(worker.engine.module), whole_parameters(resumed.engine.module)
    for name, param in ours.items():
        torch.testing.assert_close(param, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


def test_ppo_worker_saves_keep_the_newest_and_resume_on_another_mesh(tmp_path):
    run_ranks(_saves_and_resumes, 2, save_qwen3_moe(tmp_path / "model"), tmp_path / "out")


def _traced(folder, out):
    from verl.utils.profiler import DistProfiler, ProfilerConfig
    from verl.utils.profiler.config import TorchProfilerToolConfig

    worker, rank = ppo_worker(folder, 2), dist.get_rank()
    settings = ProfilerConfig(tool="torch", enable=True, all_ranks=True, save_path=str(out))
    worker.profiler = DistProfiler(rank, settings, TorchProfilerToolConfig(contents=["cpu"]))
    worker.start_profile()
    worker.train_batch(ppo_batch(ppo_samples()[8 * rank :][:8]))
    worker.stop_profile()
    (trace,) = out.glob(f"*rank{rank}-*.json.gz")
    names = [event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    # In each of two layers the experts of 4 micro-batches get tokens and send them back, as do their gradients.
    assert sum(name == "gloo:all_to_all" for name in names) >= 2 * 4 * 2 * 2, sorted(set(names))


def test_ppo_update_under_verls_torch_profiler_leaves_a_trace_of_each_rank(tmp_path):
    run_ranks(_traced, 2, save_qwen3_moe(tmp_path / "model"), tmp_path / "out")


def _supervised(folder):
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import sft_loss

    samples, plain = ppo_samples(), reference_model(folder)
    mine = samples[8 * dist.get_rank() :][:8]
    batch = ppo_batch(mine)
    masks = [torch.arange(len(ids)) >= prompt for ids, prompt, *_ in mine]
    batch["loss_mask"] = torch.nested.as_nested_tensor([mask.long() for mask in masks], layout=torch.jagged)
    worker = ppo_worker(folder, 2)
    worker.set_loss_fn(partial(sft_loss, config=None))
    answers = [plain_log_probs(plain, ids)[0][prompt - 1 :] for ids, prompt, *_ in samples]
    loss = tu.get(worker.train_batch(batch), "metrics")["loss"]
    assert loss == pytest.approx(-torch.cat(answers).mean().item(), rel=RELATIVE)


def test_supervised_update_has_the_loss_of_the_plain_model(tmp_path):
    run_ranks(_supervised, 2, save_qwen3_moe(tmp_path))


def _keeps_casts(folder, out):
    """Updates, a forward, offloading, a checkpoint and a sync, with casts that are kept and with none."""
    mine, weights, casts = ppo_samples()[8 * dist.get_rank() :][:8], [], []
    half = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}, "param_offload": True}
    for keeps in (False, True):
        worker = ppo_worker(folder, 2, keep_casts=keeps, activation_checkpointing="full", **half)
        with mock.patch.object(single_rank, "keeping_version", mock.Mock(wraps=single_rank.keeping_version)) as cast:
            for change in (partial(worker.save_checkpoint, global_step=1), worker.load_checkpoint):
                worker.train_batch(ppo_batch(mine))
                change(str(out))
                infer(worker, mine)
            casts.append(cast.call_count)
        weights.append({name: tensor.clone() for name, tensor in worker.engine.get_per_tensor_param()[0]})
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    # There are two weights in each of two layers, 2 updates of 4 micro-batches with backward, and 2 evaluations of 4.
    assert casts == [4 * 2 * (4 * 2 + 4), 4 * 2 * (1 + 1)]


def test_ppo_worker_with_kept_casts_has_the_same_bits_and_casts_once_in_each_batch(tmp_path):
    run_ranks(_keeps_casts, 2, save_qwen3_moe(tmp_path / "model"), tmp_path / "out")


def _waits_for_the_last(folder, out):
    """As ``separate_async`` with two updates in each of its steps."""
    worker = ppo_worker(folder, 2)
    engine = worker.engine
    engine.checkpoint_config = replace(engine.checkpoint_config, async_save=True)
    engine.optimizer_config = replace(engine.optimizer_config, total_training_steps=4)
    tracker = out / "latest_checkpointed_iteration.txt"
    may_write = threading.Event()
    engine._saves._save_config = lambda folder: may_write.wait()  # rank 0 writes it, and all write together
    for step in (1, 2):
        if step == 2:
            assert not tracker.exists()
            may_write.set()
        for _ in range(2):
            engine.lr_scheduler_step()
        worker.save_checkpoint(str(out / f"global_step_{step}" / "actor"), global_step=step)
    dist.barrier()  # rank 0 names them
    assert (out / "global_step_2/actor" / MANIFEST).is_file()
    assert tracker.read_text() == "1"  # verl's trainer still has to write its own part of the step
    dist.barrier()
    engine.get_per_tensor_param()
    dist.barrier()
    assert tracker.read_text() == "2"


def test_ppo_worker_with_background_saves_waits_for_the_last_at_the_end(tmp_path):
    run_ranks(_waits_for_the_last, 2, save_qwen3_moe(tmp_path / "model"), tmp_path / "out")


def _ends_a_mode(folder):
    """End modes by an error before the first forward; then let torch rename a state of FSDP."""
    worker = ppo_worker(folder, 1)
    for mode in (worker.engine.train_mode, worker.engine.eval_mode):
        with pytest.raises(ZeroDivisionError), mode():
            raise ZeroDivisionError
    renamed = mock.Mock(side_effect=AttributeError("renamed since", name="another_state"))
    with mock.patch.object(type(worker.engine.module), "reset_iter_state", renamed, create=True):
        with worker.engine.eval_mode():
            pass
        with pytest.raises(AttributeError, match="renamed since"), worker.engine.eval_mode():
            raise ZeroDivisionError


def test_ppo_worker_with_an_error_before_the_first_forward_raises_that_error(tmp_path):
    run_ranks(_ends_a_mode, 1, save_qwen3_moe(tmp_path))
