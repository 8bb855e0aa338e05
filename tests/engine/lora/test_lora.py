"""Low-rank adapters against the plain Hugging Face model that computes with ``W + scaling * B @ A``, float32."""

import json
import warnings

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from epfsdp2.engine.checkpoint.atomic_folder import CheckpointError
from epfsdp2.engine.checkpoint.export_hf import MODEL
from epfsdp2.engine.checkpoint.state import HF, SHARDS, load_checkpoint, save_checkpoint
from epfsdp2.engine.config import EPFSDP2EngineConfig
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.lora.adapters import A, B, Lora, lora_of
from epfsdp2.engine.lora.peft_files import ADAPTER, read_adapter
from epfsdp2.engine.model import hf_names
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.optim.clip import clip_grad_norm_
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.preflight.run import check_training
from epfsdp2.engine.topology.dtensor import is_adapter, local_range
from epfsdp2.recipes.convert.export import export
from epfsdp2.rollout.adapter_sync import BaseChangedError
from epfsdp2.rollout.layout.vllm_layout import Rollout
from epfsdp2.rollout.remote.delta_shards import ShardExport
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from tests.support.engine import sharded_model
from tests.support.lora import SCALING, SETTINGS, adapters_of, lora_settings, stirred, whole
from tests.support.models import VOCAB, adam, reference_model, relative_error, save_qwen3_moe, token_batch
from tests.support.names import send_stacks
from tests.support.ppo import ppo_batch, ppo_samples, ppo_worker
from tests.support.ranks import run_ranks

WORLD = 4
RELATIVE = 1e-5
CLIP = 0.5


def _sharded(folder, ep, fsdp_size=-1, seed=0, changes=None, **options):
    """Build a sharded model with adapters, as the engine does."""
    model, meshes = sharded_model(
        folder,
        dist.get_world_size(),
        ep,
        fsdp_size,
        before=lambda model: Lora(model, lora_settings(**(changes or {}))),
        initialize=lambda name, tensor, fits: is_adapter(name),
        finish=lambda model: lora_of(model).initialize(model, seed),
        **options,
    )
    lora = lora_of(model)
    lora.freeze_base(model)
    return model.train(), meshes, lora


def _merged(weights, adapters):
    """Return the weights of a plain model with these adapters merged."""
    changed = dict(weights)
    for name in weights:
        if name + A in adapters:
            changed[name] = weights[name] + SCALING * adapters[name + B] @ adapters[name + A]
    return changed


class _Reference:
    """The plain model, its frozen weights, and leaf tensors for the adapters."""

    def __init__(self, folder, adapters):
        self.model = reference_model(folder).train()
        self.weights = {name: param.detach() for name, param in self.model.named_parameters()}
        self.adapters = {name: value.clone().requires_grad_() for name, value in adapters.items()}

    def logits(self, ids):
        with_adapters = _merged(self.weights, self.adapters)
        return functional_call(self.model, with_adapters, kwargs={"input_ids": ids, "use_cache": False}).logits

    def loss(self, ids):
        return _loss(self.logits(ids), ids)


def _loss(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def _logits(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def _two_updates(folder, cases):
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = token_batch(world)
    mine = slice(2 * rank, 2 * rank + 2)
    expected = None
    for ep, fsdp_size, options in cases:
        where = f"ep={ep} fsdp_size={fsdp_size} {options}"
        model, meshes, lora = _sharded(folder, ep, fsdp_size, **options)
        lora.initialize(model, 0, stirred(model))
        base = {n: whole(p).clone() for n, p in model.named_parameters() if not is_adapter(n)}
        if expected is None:
            expected = _updates(_Reference(folder, {n: whole(p) for n, p in adapters_of(model).items()}), ids)
        optimizer = build_multi_optimizer(model, adam)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in held} == {id(p) for p in adapters_of(model).values()}
        for logits, grads, norm, params in expected:
            optimizer.zero_grad()
            got = _logits(model, ids[mine])
            torch.testing.assert_close(got.detach().log_softmax(-1), logits[mine], rtol=1e-5, atol=1e-5)
            _loss(got, ids[mine]).backward()
            assert all(p.grad is None for n, p in model.named_parameters() if not is_adapter(n)), where
            for name, param in adapters_of(model).items():
                assert relative_error(param.grad.full_tensor(), grads[name]) < RELATIVE, (where, name)
            got = clip_grad_norm_(model.parameters(), CLIP, meshes)
            assert abs(got.item() / norm.item() - 1) < RELATIVE, where
            optimizer.step()
            for name, param in adapters_of(model).items():
                assert relative_error(whole(param), params[name]) < RELATIVE, (where, name)
        assert all(torch.equal(whole(p), base[n]) for n, p in model.named_parameters() if n in base), where


def _updates(reference, ids):
    """Return log-probs, gradients, norm and adapters of two updates of the plain model."""
    optimizer = adam(list(reference.adapters.values()))
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        logits = reference.logits(ids)
        _loss(logits, ids).backward()
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
        model, _, lora = _sharded(folder, ep, seed=7)
        adapters = {name: whole(param) for name, param in adapters_of(model).items()}
        assert all(not value.any() for name, value in adapters.items() if name.endswith(B))
        assert all(value.abs().max() <= value.shape[-1] ** -0.5 for value in adapters.values())
        assert len({value.flatten()[0].item() for name, value in adapters.items() if name.endswith(A)}) > 10
        drawn = drawn or adapters
        assert all(torch.equal(value, drawn[name]) for name, value in adapters.items()), ep
        with torch.no_grad():
            with_adapters = _logits(model, ids)
            with lora.disabled():
                without = _logits(model, ids)
        assert torch.equal(with_adapters, without)
        lora.initialize(model, 0, stirred(model))
        with torch.no_grad():
            assert not torch.allclose(_logits(model, ids), without, atol=1e-2)
            with lora.disabled():
                assert torch.equal(_logits(model, ids), without)
    plain = reference_model(folder)
    with torch.no_grad():
        torch.testing.assert_close(without, _logits(plain, ids), rtol=1e-5, atol=1e-5)


def test_lora_starts_as_its_base_and_the_reference_is_the_base(tmp_path):
    run_ranks(_begins_as_the_base, WORLD, save_qwen3_moe(tmp_path))


def _wanted_weights(folder, model):
    """Merge the adapters of a sharded model into the plain model's weights, by hand."""
    adapters = {name: whole(param) for name, param in adapters_of(model).items()}
    return _merged({n: p.detach() for n, p in reference_model(folder).named_parameters()}, adapters)


def _streamed(folder, cases):
    worker = dist.get_rank() % 2
    for ep, fsdp_size, options in cases:
        where = f"ep={ep} fsdp_size={fsdp_size} {options}"
        model, meshes, lora = _sharded(folder, ep, fsdp_size, **options)
        lora.initialize(model, 0, stirred(model))
        before = {name: whole(param).clone() for name, param in model.named_parameters()}
        wanted = _wanted_weights(folder, model)
        sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", 1 << 17))

        plain = {name: value for name, value in before.items() if not is_adapter(name)}
        full = {name: tensor.clone() for name, tensor in sync.full()}
        by_expert = dict(hf_names.as_checkpoint(model, wanted.items()))
        split = [name for name in full if name not in wanted]
        unmerged = dict(hf_names.as_checkpoint(model, plain.items()))[split[0]]
        assert not torch.allclose(full[split[0]], unmerged, atol=1e-3)
        assert split and not any(is_adapter(name) for name in full)  # a stack that is too large comes as its experts
        for name, tensor in full.items():
            torch.testing.assert_close(tensor, {**by_expert, **wanted}[name], rtol=1e-6, atol=1e-7, msg=where + name)

        sliced = sync.exchange("sliced", Rollout(2), worker)
        for arrival in sliced.run(sync.state(), sync.dtypes, values=sync.values()):
            name = arrival.tensor.name
            slices = wanted[name][arrival.block.slices]
            torch.testing.assert_close(arrival.values, slices, rtol=1e-6, atol=1e-7, msg=where + name)

        local = sync.worker_weights("expert_local", Rollout(2, expert_parallel=True), worker).tensors()
        local = {name: tensor.clone() for name, tensor in local if ".experts." in name}
        assert len(local) == 2 * 3 * 4  # two layers, three matrices, four of eight experts
        for name, tensor in local.items():
            torch.testing.assert_close(tensor, by_expert[name], rtol=1e-6, atol=1e-7, msg=where + name)

        # With etp a shard may be two ranges, and this stream is refused.
        changed = ShardExport(model, meshes, torch.float32).shards() if meshes.etp_group is None else ()
        for name, values, spec in changed:
            if name in wanted and spec.place is not None:
                slices = wanted[name][local_range(model.get_parameter(name)).slices].reshape(-1)
                torch.testing.assert_close(values, slices, rtol=1e-6, atol=1e-7, msg=where + name)
        assert all(torch.equal(whole(param), before[name]) for name, param in model.named_parameters()), where


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
    model, meshes, _ = _sharded(folder, 2)
    verified, quiet = (
        RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", 1 << 17, verify_syncs=syncs))
        for syncs in (-1, 0)
    )
    for sync in (verified, quiet):
        sync.base.record()
        sync.adapters().for_rollout(None, rank)
    if rank == 0:
        with torch.no_grad():
            model.get_parameter("model.norm.weight").to_local()[0] += 1
    with pytest.raises(BaseChangedError, match=r"model.norm.weight differs.*lora.merge=True sends the weights"):
        verified.adapters().for_rollout(None, rank)
    quiet.adapters().for_rollout(None, rank)  # which compares only where something may have changed it
    quiet.base.loaded()
    with pytest.raises(BaseChangedError, match="model.norm.weight differs"):
        quiet.adapters().for_rollout(None, rank)


def test_a_base_that_was_changed_after_its_sync_ends_the_next_one_on_all_ranks(tmp_path):
    run_ranks(_changes_its_base, 2, save_qwen3_moe(tmp_path))


def _saves(folder, out):
    """Run two updates, save everything, run one more; a resumed run on another mesh does the same."""
    rank = dist.get_rank()
    ids = token_batch(dist.get_world_size())

    def update(model, meshes, optimizer):
        optimizer.zero_grad()
        _loss(_logits(model, ids[2 * rank : 2 * rank + 2]), ids[2 * rank : 2 * rank + 2]).backward()
        clip_grad_norm_(model.parameters(), CLIP, meshes)
        optimizer.step()

    model, meshes, _ = _sharded(folder, 2)
    optimizer = build_multi_optimizer(model, adam)
    for _ in range(2):
        update(model, meshes, optimizer)
    contents = ("model", "optimizer", "hf_model")
    for name, with_base in (("saved", True), ("alone", False)):
        describe = model.config.save_pretrained
        save_checkpoint(out / name, model, optimizer, None, contents, 2, describe, with_base=with_base)
    wanted = _wanted_weights(folder, model)
    update(model, meshes, optimizer)

    cut = {"etp": 2}
    meshes_to = [("alone", 4, {}), ("alone", 1, {"expert_shard_dim": 0}), ("saved", 2, {}), ("alone", 2, cut)]
    for name, ep, options in [*meshes_to, ("saved", 1, cut)]:
        resumed, other, _ = _sharded(folder, ep, seed=99, **options)
        again = build_multi_optimizer(resumed, adam)
        load_checkpoint(out / name, resumed, again, None, ("model", "optimizer"))
        update(resumed, other, again)
        for (name, a), (_, b) in zip(model.named_parameters(), resumed.named_parameters(), strict=True):
            torch.testing.assert_close(whole(a), whole(b), rtol=1e-5, atol=1e-7, msg=f"{ep} {name}")

    differing, _, _ = _sharded(folder, 2, changes={"lora_alpha": 4})
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
    """What a checkpoint without the frozen weights holds, and that other weights are refused."""
    held = {n for path in (out / "alone" / SHARDS).glob("*.safetensors") for n in load_file(path)}
    assert held and all(is_adapter(name) for name in held if name.startswith(MODEL))
    own = model.get_parameter("model.layers.1.self_attn.q_proj.weight")
    with torch.no_grad():
        whole_weight = own.full_tensor()
        if dist.get_rank() == 0:
            own.to_local()[0, 0] += 2**-20 * whole_weight[0, 0].abs()
    before = {name: whole(param) for name, param in adapters_of(model).items()}
    with pytest.raises(CheckpointError, match=r"1.self_attn.q_proj.weight differs. Resume with model.path="):
        load_checkpoint(out / "alone", model, None, None, ("model",))
    assert all(torch.equal(whole(param), before[name]) for name, param in adapters_of(model).items())
    load_checkpoint(out / "saved", model, None, None, ("model",))
    assert torch.equal(own.full_tensor(), whole_weight)


def test_a_changed_base_is_refused_by_the_export(tmp_path):
    folder, out = save_qwen3_moe(tmp_path / "model"), tmp_path / "out"
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
    model, *_ = _sharded(folder, 1)
    save_checkpoint(out, model, None, None, ("model",), 1, model.config.save_pretrained, with_base=False)


def test_lora_resumes_on_another_mesh_and_exports_merged_weights(tmp_path):
    folder, out = save_qwen3_moe(tmp_path / "model"), tmp_path / "out"
    run_ranks(_saves, WORLD, folder, out)


def _writes_an_adapter(folder, out, changes):
    model, _, lora = _sharded(folder, 2, changes=changes)
    lora.initialize(model, 0, stirred(model))
    save_checkpoint(out, model, None, None, ("model",), 1, model.config.save_pretrained)
    ids = token_batch(1)
    with torch.no_grad():
        logits = _logits(model.eval(), ids)
    if dist.get_rank() == 0:
        save_file({"logits": logits}, out.with_suffix(".logits"))
    again, _, lora = _sharded(folder, 1, changes={"lora_adapter_path": str(out / ADAPTER)})
    lora.initialize(again, 0, read_adapter(out / ADAPTER, lora, "lora_adapter_path"))
    for name, param in adapters_of(again).items():
        assert torch.equal(whole(param), whole(model.get_parameter(name))), name


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="everything"),
        pytest.param({"target_modules": ["q_proj", "o_proj"]}, id="attention", marks=pytest.mark.long),
        pytest.param(
            {"target_modules": ["experts.down_proj", "layers.1.mlp.up_proj"]}, id="experts", marks=pytest.mark.long
        ),
    ],
)
def test_lora_adapter_that_was_saved_is_loaded_by_peft(tmp_path, changes):
    folder, out = save_qwen3_moe(tmp_path / "model"), tmp_path / "out"
    run_ranks(_writes_an_adapter, 2, folder, out, changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # peft warns of keys that it misses, or has no place for
        adapted = PeftModel.from_pretrained(reference_model(folder), out / ADAPTER)
    with torch.no_grad():
        logits = adapted(input_ids=token_batch(1), use_cache=False).logits
        with adapted.disable_adapter():
            base = adapted(input_ids=token_batch(1), use_cache=False).logits
    torch.testing.assert_close(logits, load_file(out.with_suffix(".logits"))["logits"], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits, base, atol=1e-2)
    # What peft saves itself is what we read.
    adapted.save_pretrained(out.with_suffix(".peft"))
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (out / ADAPTER, out.with_suffix(".peft")))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    own = Lora(reference_model(folder), lora_settings(**changes))
    for path in (out / ADAPTER, out.with_suffix(".peft")):
        lora = Lora(reference_model(folder), lora_settings(lora_alpha=1, lora_adapter_path=str(path)))
        assert lora.targets.keys() == own.targets.keys()
        assert {target.scaling for target in lora.targets.values()} == {SCALING}
        read_adapter(path, lora, "lora_adapter_path")


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
        assert torch.equal(whole(module.get_parameter(name)), param), name

    worker.save_checkpoint(str(out), global_step=2)
    resumed = ppo_worker(folder, 1, model=model_settings)
    resumed.load_checkpoint(str(out))
    gone_on = ppo_worker(folder, 1, model=model_settings | {"lora_adapter_path": str(out / ADAPTER)})
    for other in (resumed, gone_on):
        for a, b in zip(log_probs(other), trained, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_lora_in_an_actor_of_verl_has_its_base_as_the_reference(tmp_path):
    run_ranks(_by_verl, 2, save_qwen3_moe(tmp_path / "model"), tmp_path / "out")


@pytest.fixture
def checked(tmp_path):
    """Return ``check_training`` for a run with adapters, with changes to verl's model settings."""
    folder = save_qwen3_moe(tmp_path / "model")
    (tmp_path / "adapter").mkdir()
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_dora": False}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))

    def check(changes=None, setting="actor_rollout_ref.model", optim=None, **engine):
        model = {"path": str(folder), "override_config": {"attn_implementation": "sdpa"}, **SETTINGS, **(changes or {})}
        model = {
            key: value.replace("$", str(tmp_path)) if isinstance(value, str) else value for key, value in model.items()
        }
        return check_training(EPFSDP2EngineConfig(**engine), 8, model, device="cpu", setting=setting, optim=optim)

    return check


def test_lora_check_accepts_a_run_that_works(checked):
    assert checked().name == "Qwen3MoeForCausalLM"
    assert checked(ep_size=8, fsdp_size=8) is not None
    assert checked({"target_modules": None, "target_parameters": ["experts.down_proj"]}) is not None
    assert checked({"target_modules": r".*self_attn\.[qv]_proj"}) is not None
    assert checked({"lora_rank": 0}) is not None
    assert checked(setting="critic.model") is not None
    assert checked({"lora": {"modules_to_save": ["lm_head"]}}) is not None
    muon = {"optimizer": "Muon", "optimizer_impl": "torch.optim", "lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.99)}
    assert checked(optim=muon, router_aux_loss_coef=0.1) is not None


@pytest.mark.parametrize(
    ("changes", "rest", "said"),
    [
        ({"target_modules": ["qproj"]}, {}, "target_modules=['qproj']: qproj matches no linear of a layer"),
        ({"target_modules": "q_proj"}, {}, "target_modules=q_proj: q_proj matches no linear of a layer"),
        ({"target_modules": ["lm_head"]}, {}, "target_modules=['lm_head']: lm_head matches no linear of a layer"),
        ({"target_modules": ["up_proj"]}, {}, "target_modules=['up_proj']: model.layers.0.mlp.experts.gate_up_proj is"),
        ({"target_modules": None}, {}, "target_modules=null: neither this nor target_parameters"),
        ({"target_parameters": ["experts.w1"]}, {}, "target_parameters=['experts.w1']: experts.w1 matches no"),
        ({"exclude_modules": ["x_proj"]}, {}, "exclude_modules=['x_proj']: x_proj matches no"),
        ({"exclude_modules": ".*"}, {}, "exclude_modules=.*: it excludes all weights"),
        ({"lora_rank": -1}, {}, "lora_rank=-1: has to be an integer"),
        ({"lora_rank": 2.0}, {}, "lora_rank=2.0: has to be an integer"),
        ({"lora_alpha": 0}, {}, "lora_alpha=0: has to be a positive number"),
        ({"lora": {"rank": 8}}, {}, "lora.rank=8: is verl's setting for Megatron"),
        ({"lora_adapter_path": "/no/such"}, {}, "lora_adapter_path=/no/such: it holds no adapter_config.json"),
        ({"lora_adapter_path": "$/adapter"}, {}, "lora_adapter_path=$/adapter: it holds no adapter_model.safetensors"),
        ({"lora_adapter_path": "$/adapter", "lora_rank": 0}, {}, "lora_rank=0: differs from the rank of"),
        ({"lora": {"use_dora": True}}, {}, "lora.use_dora=True: peft has DoRA for linears alone"),
        (
            {"lora": {"modules_to_save": ["lm_head"]}, "use_fused_kernels": True},
            {},
            "lora.modules_to_save=['lm_head']: verl's fused kernels read the head's weight",
        ),
        (
            {"lora": {"modules_to_save": ["norm"]}},
            {"compile_dense": True},
            "lora.modules_to_save=['norm']: its modules exchange their weights in a forward",
        ),
        (
            {},
            {"experts_backend": "transformers:grouped_mm"},
            "transformers:grouped_mm: adds no adapter",
        ),
        (
            {"lora_rank": 6},
            {"expert_shard_dim": 1},
            "engine.expert_shard_dim=1: an expert weight has size 6 along this dim",
        ),
    ],
)
def test_lora_check_refuses_bad_settings(checked, tmp_path, changes, rest, said):
    with pytest.raises(SettingError) as caught:
        checked(changes, **rest)
    assert said.replace("$", str(tmp_path)) in str(caught.value)


def test_lora_check_refuses_an_adapter_of_another_kind(checked, tmp_path):
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_dropout": 0.1}))
    with pytest.raises(SettingError, match="its lora_dropout is 0.1"):
        checked({"lora_adapter_path": "$/adapter"})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_dropout": 0.0}))
    save_file({"base_model.model.q_proj.lora_A.weight": torch.zeros(1)}, path.with_name("adapter_model.safetensors"))
    with pytest.raises(SettingError, match="q_proj.lora_A.weight is missing"):
        checked({"lora_adapter_path": "$/adapter"})


def _routes_of_the_reference(folder):
    """R2: the reference policy, which is the same module, does not take the routes that the log-probs record."""
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
