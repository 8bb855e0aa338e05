"""The frozen base of adapters: it is what training starts with, the reference policy, and what a rollout holds."""

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.lora.adapters import A, B
from epfsdp2.engine.lora.frozen_base import BaseChangedError
from epfsdp2.engine.lora.peft_files import ADAPTER
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from tests.support.engine.lora import SETTINGS, adapters_of, sharded_with_adapters, stirred
from tests.support.engine.sharded import whole_tensor, whole_tensors
from tests.support.models.names import send_stacks
from tests.support.models.tiny import reference_model, save_qwen3_moe, token_batch
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import infer, plain_log_probs, ppo_batch, ppo_samples, ppo_worker


def _begins_as_the_base(folder):
    ids, drawn = token_batch(dist.get_world_size()), None

    @torch.no_grad()
    def logits_of(model):
        return model(input_ids=ids, use_cache=False).logits

    for ep in (1, 2, 4):
        model, _, lora = sharded_with_adapters(folder, ep, seed=7)
        adapters = whole_tensors(adapters_of(model))
        assert all(not value.any() for name, value in adapters.items() if name.endswith(B))
        assert all(value.abs().max() <= value.shape[-1] ** -0.5 for value in adapters.values())
        assert len({value.flatten()[0].item() for name, value in adapters.items() if name.endswith(A)}) > 10
        drawn = drawn or adapters
        assert all(torch.equal(value, drawn[name]) for name, value in adapters.items()), ep
        with lora.disabled():
            without = logits_of(model)
        assert torch.equal(logits_of(model), without)
        lora.initialize(model, 0, stirred(model))
        assert not torch.allclose(logits_of(model), without, atol=1e-2)
        with lora.disabled():
            assert torch.equal(logits_of(model), without)
    torch.testing.assert_close(without, logits_of(reference_model(folder)), rtol=1e-5, atol=1e-5)


def test_lora_starts_as_its_base_and_the_reference_is_the_base(tmp_path):
    run_ranks(_begins_as_the_base, 4, save_qwen3_moe(tmp_path))


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
    """Run log-probs, updates, the reference policy, weights and checkpoints through verl's own worker.

    Router replay is on, whose routes the reference policy, the same module, neither records nor replays.
    """
    from verl.utils import tensordict_utils as tu
    from verl.workers.config.engine import EngineRouterReplayConfig

    send_stacks()
    mine = ppo_samples()[4 * dist.get_rank() :][:4]
    model_settings = SETTINGS | {"lora": {"merge": True}}
    replay = EngineRouterReplayConfig(mode="R2")
    worker = ppo_worker(folder, 2, model=model_settings, param_offload=True, router_replay=replay)
    module, plain = worker.engine.module, reference_model(folder)

    def outputs(worker, **flags):
        output = infer(worker, mine, **flags)
        return [taken[:-1] for taken in tu.get(output, "log_probs").unbind()], output.get("routed_experts", None)

    base, routes = outputs(worker)
    for _ in range(2):
        batch = ppo_batch(mine)
        batch["routed_experts"] = routes
        metrics = tu.get(worker.train_batch(batch), "metrics")
        routes = outputs(worker)[1]
    assert metrics["router_replay_differing"] == [[0.0], [0.0]]
    (trained, _), (reference, unrecorded) = outputs(worker), outputs(worker, no_lora_adapter=True)
    assert unrecorded is None
    weights, peft_config = worker.engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    merged = reference_model(folder)
    with torch.no_grad():
        for name, tensor in weights:
            merged.get_parameter(name).copy_(tensor)
    assert peft_config is None
    assert all(map(torch.equal, reference, base))
    for model, found in ((plain, reference), (merged, trained)):
        for (ids, *_), got in zip(mine, found, strict=True):
            torch.testing.assert_close(got, plain_log_probs(model, ids)[0], rtol=1e-5, atol=1e-5)
    assert max((a - b).abs().max() for a, b in zip(trained, base, strict=True)) > 1e-3
    for name, param in plain.named_parameters():
        assert torch.equal(whole_tensor(module.get_parameter(name)), param), name

    worker.save_checkpoint(str(out), global_step=2)
    resumed = ppo_worker(folder, 1, model=model_settings)
    resumed.load_checkpoint(str(out))
    gone_on = ppo_worker(folder, 1, model=model_settings | {"lora_adapter_path": str(out / ADAPTER)})
    for other in (resumed, gone_on):
        for a, b in zip(outputs(other)[0], trained, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_lora_in_an_actor_of_verl_has_its_base_as_the_reference(tmp_path):
    run_ranks(_by_verl, 2, save_qwen3_moe(tmp_path / "model"), tmp_path / "out")
