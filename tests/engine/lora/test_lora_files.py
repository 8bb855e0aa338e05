"""Adapters in checkpoints and exports."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from epfsdp2.engine.checkpoint.atomic_folder import CheckpointError
from epfsdp2.engine.checkpoint.state import load_checkpoint
from epfsdp2.engine.checkpoint.stored_shards import HF, MODEL, SHARDS
from epfsdp2.engine.optim.clip import clip_grad_norm_
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.topology.dtensor import is_adapter
from epfsdp2.recipes.export import export
from tests.support.engine.checkpoints import save_checkpoint
from tests.support.engine.lora import adapted_weights, adapters_of, sharded_with_adapters
from tests.support.engine.sharded import whole_parameters, whole_tensor, whole_tensors
from tests.support.models.tiny import reference_model, save_qwen3_moe, token_batch, token_loss
from tests.support.ranks import run_ranks


def _adam(params):
    """Return ``adam`` with a larger eps, for small gradients of adapters on processors without AVX-512."""
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-5)


def _saves(folder, out):
    """Run two updates, save everything and run one more; run the last one on another mesh too, resumed."""
    rank = dist.get_rank()
    ids = token_batch(dist.get_world_size())

    def update(model, meshes, optimizer):
        optimizer.zero_grad()
        token_loss(model, ids[2 * rank : 2 * rank + 2]).backward()
        clip_grad_norm_(model.parameters(), 0.5, meshes)
        optimizer.step()

    model, meshes, _ = sharded_with_adapters(folder, 2)
    optimizer = build_multi_optimizer(model, _adam)
    for _ in range(2):
        update(model, meshes, optimizer)
    contents = ("model", "optimizer", "hf_model")
    for name, with_base in (("saved", True), ("alone", False)):
        describe = model.config.save_pretrained
        save_checkpoint(out / name, model, optimizer, None, contents, 2, describe, with_base=with_base)
    wanted = adapted_weights(folder, model)
    update(model, meshes, optimizer)

    for name, ep, options in [("alone", 4, {}), ("saved", 1, {"expert_shard_dim": 0}), ("alone", 2, {"etp": 2})]:
        resumed, other, _ = sharded_with_adapters(folder, ep, seed=99, **options)
        again = build_multi_optimizer(resumed, _adam)
        load_checkpoint(out / name, resumed, again, None, ("model", "optimizer"))
        update(resumed, other, again)
        ours, theirs = whole_parameters(model), whole_parameters(resumed)
        for name, param in ours.items():
            torch.testing.assert_close(param, theirs[name], rtol=1e-5, atol=1e-7, msg=f"{ep} {name}")

    differing, _, _ = sharded_with_adapters(folder, 2, changes={"lora_alpha": 4})
    with pytest.raises(CheckpointError, match="'alpha': 12"):
        load_checkpoint(out / "saved", differing, None, None, ("model",))
    _without_the_base(out, model)
    if rank == 0:
        exported = reference_model(out / "saved" / HF)
        for name, param in exported.named_parameters():
            torch.testing.assert_close(param.detach(), wanted[name], rtol=1e-6, atol=1e-7, msg=name)
        written = (out / "saved" / HF / "model.safetensors").read_bytes()
        assert (out / "alone" / HF / "model.safetensors").read_bytes() == written
        for name, base in (("saved", None), ("alone", None), ("alone", folder)):
            to = out / f"{name} {base is None}"
            export(out / name, to, base=base)
            assert (to / "model.safetensors").read_bytes() == written


def _without_the_base(out, model):
    """Check a checkpoint without frozen weights: its tensors, and the refusal of other weights."""
    held = {n for path in (out / "alone" / SHARDS).glob("*.safetensors") for n in load_file(path)}
    assert held and all(is_adapter(name) for name in held if name.startswith(MODEL))
    own = model.get_parameter("model.layers.1.self_attn.q_proj.weight")
    with torch.no_grad():
        whole_weight = whole_tensor(own)
        if dist.get_rank() == 0:
            own.to_local()[0, 0] += 2**-20 * whole_weight[0, 0].abs()
    before = whole_tensors(adapters_of(model))
    with pytest.raises(CheckpointError, match=r"1.self_attn.q_proj.weight differs. Resume with model.path="):
        load_checkpoint(out / "alone", model, None, None, ("model",))
    assert all(torch.equal(param, before[name]) for name, param in whole_tensors(adapters_of(model)).items())
    load_checkpoint(out / "saved", model, None, None, ("model",))
    assert torch.equal(whole_tensor(own), whole_weight)


def test_lora_export_of_a_changed_base_is_refused(tmp_path):
    folder, out = save_qwen3_moe(tmp_path / "model", one_file=True), tmp_path / "out"
    run_ranks(_saves_alone, 1, folder, out)
    export(out, tmp_path / "first")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="lm_head.weight of .* is not what the adapters of"):
        export(out, tmp_path / "second")
    with pytest.raises(CheckpointError, match="is no folder here: name one with --base"):
        export(out, tmp_path / "third", base=tmp_path / "nowhere")
    assert not (tmp_path / "second").exists()


def _saves_alone(folder, out):
    model, *_ = sharded_with_adapters(folder, 1)
    save_checkpoint(out, model, None, None, ("model",), 1, model.config.save_pretrained, with_base=False)


def test_lora_resumes_on_another_mesh_and_exports_merged_weights(tmp_path):
    folder, out = save_qwen3_moe(tmp_path / "model"), tmp_path / "out"
    run_ranks(_saves, 4, folder, out)
