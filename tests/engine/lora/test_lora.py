"""Low-rank adapters against the plain Hugging Face model that computes with ``W + scaling * B @ A``, float32."""

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call

from epfsdp2.engine.integration.delta_shards import ShardExport
from epfsdp2.engine.lora.adapters import A, B
from epfsdp2.engine.lora.frozen_base import BaseChangedError
from epfsdp2.engine.lora.peft_files import ADAPTER
from epfsdp2.engine.model import hf_names
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.optim.clip import clip_grad_norm_
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.topology.dtensor import is_adapter, local_range
from epfsdp2.rollout.layout.specs import Rollout
from epfsdp2.rollout.servers import target_slices
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from tests.support.engine.lora import SETTINGS, adapters_of, stirred
from tests.support.engine.lora_runs import (
    CLIP,
    WORLD,
    logits_of,
    merged_weights,
    next_token_loss,
    sharded_with_adapters,
    weights_with_adapters,
)
from tests.support.engine.sharded import whole_parameters, whole_tensor, whole_tensors
from tests.support.models.names import send_stacks
from tests.support.models.tiny import adam, reference_model, relative_error, save_qwen3_moe, token_batch
from tests.support.ranks import run_ranks
from tests.support.rollout.sent_slices import collected, stored_parameters, weights_for
from tests.support.trainer.ppo import ppo_batch, ppo_samples, ppo_worker

RELATIVE = 1e-5


class _Reference:
    """The plain model, its frozen weights, and leaf tensors for the adapters."""

    def __init__(self, folder, adapters):
        self.model = reference_model(folder).train()
        self.weights = {name: param.detach() for name, param in self.model.named_parameters()}
        self.adapters = {name: value.clone().requires_grad_() for name, value in adapters.items()}

    def logits(self, ids):
        with_adapters = merged_weights(self.weights, self.adapters)
        return functional_call(self.model, with_adapters, kwargs={"input_ids": ids, "use_cache": False}).logits

    def loss(self, ids):
        return next_token_loss(self.logits(ids), ids)


def _two_updates(folder, cases):
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = token_batch(world)
    mine = slice(2 * rank, 2 * rank + 2)
    expected = None
    for ep, fsdp_size, options in cases:
        where = f"ep={ep} fsdp_size={fsdp_size} {options}"
        model, meshes, lora = sharded_with_adapters(folder, ep, fsdp_size, **options)
        lora.initialize(model, 0, stirred(model))
        base = whole_tensors({n: p for n, p in model.named_parameters() if not is_adapter(n)})
        if expected is None:
            expected = _updates(_Reference(folder, whole_tensors(adapters_of(model))), ids)
        optimizer = build_multi_optimizer(model, adam)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in held} == {id(p) for p in adapters_of(model).values()}
        for logits, grads, norm, params in expected:
            optimizer.zero_grad()
            got = logits_of(model, ids[mine])
            torch.testing.assert_close(got.detach().log_softmax(-1), logits[mine], rtol=1e-5, atol=1e-5)
            next_token_loss(got, ids[mine]).backward()
            assert all(p.grad is None for n, p in model.named_parameters() if not is_adapter(n)), where
            for name, grad in whole_tensors({n: p.grad for n, p in adapters_of(model).items()}).items():
                assert relative_error(grad, grads[name]) < RELATIVE, (where, name)
            got = clip_grad_norm_(model.parameters(), CLIP, meshes)
            assert abs(got.item() / norm.item() - 1) < RELATIVE, where
            optimizer.step()
            for name, param in whole_tensors(adapters_of(model)).items():
                assert relative_error(param, params[name]) < RELATIVE, (where, name)
        assert all(torch.equal(p, base[n]) for n, p in whole_parameters(model).items() if n in base), where


def _updates(reference, ids):
    """Return log-probs, gradients, norm and adapters of two updates of the plain model."""
    optimizer = adam(list(reference.adapters.values()))
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        logits = reference.logits(ids)
        next_token_loss(logits, ids).backward()
        grads = {n: p.grad.clone() for n, p in reference.adapters.items()}
        norm = torch.nn.utils.clip_grad_norm_(reference.adapters.values(), CLIP)
        optimizer.step()
        params = {n: p.detach().clone() for n, p in reference.adapters.items()}
        expected.append((logits.detach().log_softmax(-1), grads, norm, params))
    return expected


def test_lora_log_probs_gradients_and_two_updates_equal_the_plain_model(tmp_path):
    cases = [
        (1, -1, {"checkpointing": "full"}),
        (2, -1, {}),
        (4, -1, {"checkpointing": "selective"}),
        (2, 2, {}),
        (2, -1, {"expert_shard_dim": 0}),
        (2, -1, {"cpu_offload": True}),
    ]
    run_ranks(_two_updates, WORLD, save_qwen3_moe(tmp_path), cases)


def _begins_as_the_base(folder):
    ids = token_batch(dist.get_world_size())
    drawn = None
    for ep in (1, 2, 4):
        model, _, lora = sharded_with_adapters(folder, ep, seed=7)
        adapters = whole_tensors(adapters_of(model))
        assert all(not value.any() for name, value in adapters.items() if name.endswith(B))
        assert all(value.abs().max() <= value.shape[-1] ** -0.5 for value in adapters.values())
        assert len({value.flatten()[0].item() for name, value in adapters.items() if name.endswith(A)}) > 10
        drawn = drawn or adapters
        assert all(torch.equal(value, drawn[name]) for name, value in adapters.items()), ep
        with torch.no_grad():
            with_adapters = logits_of(model, ids)
            with lora.disabled():
                without = logits_of(model, ids)
        assert torch.equal(with_adapters, without)
        lora.initialize(model, 0, stirred(model))
        with torch.no_grad():
            assert not torch.allclose(logits_of(model, ids), without, atol=1e-2)
            with lora.disabled():
                assert torch.equal(logits_of(model, ids), without)
    plain = reference_model(folder)
    with torch.no_grad():
        torch.testing.assert_close(without, logits_of(plain, ids), rtol=1e-5, atol=1e-5)


def test_lora_starts_as_its_base_and_the_reference_is_the_base(tmp_path):
    run_ranks(_begins_as_the_base, WORLD, save_qwen3_moe(tmp_path))


def _streamed(folder, cases):
    worker = dist.get_rank() % 2
    for ep, fsdp_size, options in cases:
        where = f"ep={ep} fsdp_size={fsdp_size} {options}"
        model, meshes, lora = sharded_with_adapters(folder, ep, fsdp_size, **options)
        lora.initialize(model, 0, stirred(model))
        before = whole_parameters(model)
        wanted = weights_with_adapters(folder, model)
        sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", 1 << 18))

        plain = {name: value for name, value in before.items() if not is_adapter(name)}
        full = {name: tensor.clone() for name, tensor in sync.full()}
        by_expert = dict(hf_names.as_checkpoint(model, wanted.items()))
        split = [name for name in full if name not in wanted]
        unmerged = dict(hf_names.as_checkpoint(model, plain.items()))[split[0]]
        assert not torch.allclose(full[split[0]], unmerged, atol=1e-3)
        assert split and not any(is_adapter(name) for name in full)  # a stack larger than a bucket is sent by expert
        for name, tensor in full.items():
            torch.testing.assert_close(tensor, {**by_expert, **wanted}[name], rtol=1e-6, atol=1e-7, msg=where + name)

        for whole_experts in (False, True):
            rollout = Rollout(2, expert_parallel=whole_experts)
            sliced = collected(weights_for(sync, rollout, worker).tensors())
            slices = (
                (part, wanted[spec.name])
                for spec in sync.sent_model().tensors
                for part in target_slices(spec, rollout, worker, sync.heads)
            )
            kept = stored_parameters(slices)
            assert sliced.keys() == kept.keys()
            for name, (values, is_filled) in kept.items():
                found = sliced[name]
                assert found.shape == values.shape
                torch.testing.assert_close(found[is_filled], values[is_filled], rtol=1e-6, atol=1e-7, msg=where + name)

        # With etp a shard may have two ranges, which this stream refuses.
        changed = ShardExport(model, meshes, torch.float32).shards() if meshes.etp_group is None else ()
        for name, values, spec in changed:
            if name in wanted and spec.place is not None:
                slices = wanted[name][local_range(model.get_parameter(name)).slices].reshape(-1)
                torch.testing.assert_close(values, slices, rtol=1e-6, atol=1e-7, msg=where + name)
        assert all(torch.equal(param, before[name]) for name, param in whole_parameters(model).items()), where


def test_lora_weights_are_merged_in_every_stream(tmp_path):
    cases = [
        (2, -1, {}),
        (4, -1, {}),
        (1, -1, {"expert_shard_dim": 0}),
        (2, -1, {"expert_shard_dim": 0}),
        (2, 2, {"cpu_offload": True}),
        (2, -1, {"etp": 2}),
        (1, -1, {"etp": 2}),
    ]
    run_ranks(_streamed, WORLD, save_qwen3_moe(tmp_path), cases)


def _changes_its_base(folder):
    rank = dist.get_rank()
    model, meshes, _ = sharded_with_adapters(folder, 2)
    verified, quiet = (
        RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", 1 << 17, verify_syncs=syncs))
        for syncs in (-1, 0)
    )
    for sync in (verified, quiet):
        sync.base.record()
        sync.weights("alone").for_rollout(None, rank)
    if rank == 0:
        with torch.no_grad():
            model.get_parameter("model.norm.weight").to_local()[0] += 1
    with pytest.raises(BaseChangedError, match=r"model.norm.weight differs.*lora.merge=True sends the weights"):
        verified.weights("alone").for_rollout(None, rank)
    quiet.weights("alone").for_rollout(None, rank)  # compares only after a checkpoint was loaded
    quiet.base.loaded()
    with pytest.raises(BaseChangedError, match="model.norm.weight differs"):
        quiet.weights("alone").for_rollout(None, rank)


def test_a_base_that_was_changed_after_its_sync_ends_the_next_one_on_all_ranks(tmp_path):
    run_ranks(_changes_its_base, 2, save_qwen3_moe(tmp_path))


def _by_verl(folder, out):
    """Run log-probs, an update, the reference policy, weights and checkpoints through verl's own worker."""
    from verl.utils import tensordict_utils as tu

    send_stacks()
    mine = ppo_samples()[4 * dist.get_rank() :][:4]
    model_settings = SETTINGS | {"lora": {"merge": True}}
    worker = ppo_worker(folder, 2, model=model_settings, param_offload=True)
    module, plain = worker.engine.module, reference_model(folder)

    def log_probs(worker, **flags):
        batch = ppo_batch(mine)
        tu.assign_non_tensor(batch, compute_loss=False, **flags)
        return [taken[:-1] for taken in tu.get(worker.infer_batch(batch), "log_probs").unbind()]

    def plain_log_probs(model):
        with torch.no_grad():
            whole = [(model(input_ids=ids[None], use_cache=False).logits[0] / 0.7).log_softmax(-1) for ids, *_ in mine]
        return [row[:-1].gather(-1, ids[1:, None])[:, 0] for row, (ids, *_) in zip(whole, mine, strict=True)]

    base = log_probs(worker)
    for _ in range(2):
        worker.train_batch(ppo_batch(mine))
    trained, reference = log_probs(worker), log_probs(worker, no_lora_adapter=True)
    weights, peft_config = worker.engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    merged = reference_model(folder)
    with torch.no_grad():
        for name, tensor in weights:
            merged.get_parameter(name).copy_(tensor)
    assert peft_config is None
    for i, want in enumerate(plain_log_probs(plain)):
        torch.testing.assert_close(reference[i], want, rtol=1e-5, atol=1e-5)
        assert torch.equal(reference[i], base[i])
    for i, want in enumerate(plain_log_probs(merged)):
        torch.testing.assert_close(trained[i], want, rtol=1e-5, atol=1e-5)
    assert max((a - b).abs().max() for a, b in zip(trained, base, strict=True)) > 1e-3
    for name, param in plain.named_parameters():
        assert torch.equal(whole_tensor(module.get_parameter(name)), param), name

    worker.save_checkpoint(str(out), global_step=2)
    resumed = ppo_worker(folder, 1, model=model_settings)
    resumed.load_checkpoint(str(out))
    gone_on = ppo_worker(folder, 1, model=model_settings | {"lora_adapter_path": str(out / ADAPTER)})
    for other in (resumed, gone_on):
        for a, b in zip(log_probs(other), trained, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_lora_in_an_actor_of_verl_has_its_base_as_the_reference(tmp_path):
    run_ranks(_by_verl, 2, save_qwen3_moe(tmp_path / "model"), tmp_path / "out")


def _routes_of_the_reference(folder):
    """R2: the reference policy, the same module, does not replay the routes recorded with the log-probs."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.config.engine import EngineRouterReplayConfig

    replay = EngineRouterReplayConfig(mode="R2")
    worker = ppo_worker(folder, 2, model=SETTINGS, router_replay=replay)
    mine = ppo_samples()[4 * dist.get_rank() :][:4]

    def infer(**flags):
        batch = ppo_batch(mine)
        tu.assign_non_tensor(batch, compute_loss=False, **flags)
        return worker.infer_batch(batch)

    routes = tu.get(infer(), "routed_experts")
    reference = infer(no_lora_adapter=True)
    assert routes is not None and reference.get("routed_experts", None) is None
    batch = ppo_batch(mine)
    batch["routed_experts"] = routes
    metrics = tu.get(worker.train_batch(batch), "metrics")
    assert metrics["router_replay_differing"] == [[0.0], [0.0]]


@pytest.mark.long
def test_lora_reference_routes_for_itself_under_router_replay(tmp_path):
    run_ranks(_routes_of_the_reference, 2, save_qwen3_moe(tmp_path))
