"""Adapters against ``peft.PeftModel`` in one process on the whole batch, float32; and peft's files."""

import warnings

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from epfsdp2.engine.lora.adapters import Lora, lora_of
from epfsdp2.engine.lora.peft_files import ADAPTER, as_peft, peft_names, read_adapter
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.optim.clip import clip_grad_norm_
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.topology.dtensor import is_adapter
from tests.support.engine.checkpoints import save_checkpoint
from tests.support.engine.lora import adapters_of, lora_settings, stirred
from tests.support.engine.sharded import full_tensors, sharded_model, whole_tensors
from tests.support.models.tiny import VOCAB, adam, reference_model, relative_error, save_qwen3_moe, token_batch
from tests.support.ranks import run_ranks

WORLD = 4
RELATIVE = 1e-5
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS = {
    "rslora": {"lora": {"use_rslora": True}},
    "dora": {"target_modules": ATTENTION, "lora": {"use_dora": True}},
    "dora by verl's name": {"target_modules": ["q_proj", "v_proj"], "lora": {"type": "dora", "use_rslora": True}},
    "modules_to_save": {"lora": {"modules_to_save": ["lm_head", "embed_tokens", "norm", "mlp.gate"]}},
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "experts.down_proj"],
        "exclude_modules": ["layers.1.self_attn.v_proj"],
        "lora": {"rank_pattern": {"q_proj": 6, "down_proj": 2}, "alpha_pattern": {r"1.self_attn.[qk]_proj": 5}},
    },
}
MESHES = [("rslora", 2, 1, -1, {"expert_shard_dim": 0}), ("rslora", 1, 2, -1, {}), ("rslora", 2, 1, 2, {})]
MESHES += [("dora", 4, 1, -1, {"checkpointing": "selective"}), ("dora", 1, 1, 2, {})]
MESHES += [("dora by verl's name", 1, 1, -1, {"cpu_offload": True})]
MESHES += [("modules_to_save", 2, 1, 2, {"checkpointing": "full"}), ("patterns", 2, 2, -1, {})]


def _loaded_by_peft(folder, adapter):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # peft warns of missing and unknown keys
        # The patterns also name parameters, which this warning of peft disregards.
        warnings.filterwarnings("ignore", message=".*_pattern keys did not match any targeted module")
        return PeftModel.from_pretrained(reference_model(folder), adapter, is_trainable=True).train()


def _compared_with_peft(folder, out, meshes_of_kinds):
    ids = token_batch(dist.get_world_size())
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)

    def loss(logits, ids):
        return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))

    for number, (kind, ep, etp, fsdp_size, options) in enumerate(meshes_of_kinds):
        where = f"{kind} ep={ep} etp={etp} fsdp_size={fsdp_size} {options}"
        model, meshes = sharded_model(
            folder,
            dist.get_world_size(),
            ep,
            fsdp_size,
            etp,
            before=lambda model, kind=kind: Lora(model, lora_settings(**KINDS[kind])),
            initialize=lambda name, tensor, fits: is_adapter(name),
            finish=lambda model: lora_of(model).initialize(model, 0, stirred(model)),
            **options,
        )
        lora, saved = lora_of(model), out / str(number)
        lora.freeze_base(model)
        save_checkpoint(saved, model, None, None, ("model",), 1, model.config.save_pretrained, with_base=False)
        plain = _loaded_by_peft(folder, saved / ADAPTER)
        wanted = plain(input_ids=ids, use_cache=False).logits
        loss(wanted, ids).backward()
        leaves = {n: p for n, p in plain.named_parameters() if p.requires_grad}
        grads = get_peft_model_state_dict(plain, {n: p.grad.clone() for n, p in leaves.items()})
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), 0.5)
        adam(leaves.values()).step()

        logits = model.train()(input_ids=ids[mine], use_cache=False).logits
        assert relative_error(logits.detach(), wanted.detach()[mine]) < RELATIVE, where
        loss(logits, ids[mine]).backward()
        names = {name + suffix: (key, suffix, name) for (name, suffix), key in peft_names(lora).items()}
        trained = adapters_of(model)
        assert names.keys() == trained.keys() and {key for key, *_ in names.values()} == grads.keys(), where
        grads_here = whole_tensors({n: p.grad for n, p in trained.items()})
        assert abs(clip_grad_norm_(model.parameters(), 0.5, meshes).item() / norm.item() - 1) < RELATIVE, where
        build_multi_optimizer(model, adam).step()
        stepped = get_peft_model_state_dict(plain)
        for here, there in ((grads_here, grads), (whole_tensors(trained), stepped)):
            for name, (key, suffix, weight) in names.items():
                experts = lora.targets[weight].experts if weight in lora.targets else None
                assert relative_error(as_peft(here[name].cpu(), suffix, experts), there[key]) < RELATIVE, (where, name)
        assert all(param.grad is None for name, param in model.named_parameters() if name not in trained), where

        with torch.no_grad(), lora.disabled(), plain.disable_adapter():
            base = model(input_ids=ids[mine], use_cache=False).logits
            assert relative_error(base, plain(input_ids=ids, use_cache=False).logits[mine]) < RELATIVE, where
        assert relative_error(base, logits.detach()) > 1e-2, where
        merged = plain.merge_and_unload().state_dict()
        for name, tensor in full_tensors(model, meshes, layer_names(model), 1 << 20):
            assert relative_error(tensor.cpu(), merged[name]) < RELATIVE, (where, name)


def test_adapters_of_every_setting_equal_those_of_peft(tmp_path):
    (tmp_path / "out").mkdir()
    run_ranks(_compared_with_peft, WORLD, save_qwen3_moe(tmp_path / "model"), tmp_path / "out", MESHES, timeout=900)


@pytest.mark.parametrize("kind", list(KINDS))
def test_adapters_that_peft_has_saved_are_read_unchanged(tmp_path, kind):
    """The config is as users write it for peft, not as this engine writes it."""
    folder, changes = save_qwen3_moe(tmp_path / "model"), dict(KINDS[kind])
    config = LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=[name for name in changes.get("target_modules", ATTENTION) if "experts" not in name],
        target_parameters=["mlp.experts.down_proj"] if kind in ("rslora", "patterns") else None,
        exclude_modules=changes.get("exclude_modules"),
        init_lora_weights=False,
        **({"use_dora": True, "use_rslora": True} if "verl" in kind else changes["lora"]),
    )
    adapted = get_peft_model(reference_model(folder), config)
    adapted.save_pretrained(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    settings = lora_settings(lora_alpha=1, lora_adapter_path=str(tmp_path / "adapter"))
    lora = Lora(model := reference_model(folder), settings)
    read = read_adapter(tmp_path / "adapter", lora, "lora_adapter_path")
    lora.initialize(model, 0, read)
    found = {
        key: as_peft(model.get_parameter(name + end), end, lora.targets[name].experts if name in lora.targets else None)
        for (name, end), key in peft_names(lora).items()
    }
    assert found.keys() == tensors.keys() and all(torch.equal(found[key], tensors[key]) for key in tensors)
    if any(target.experts for target in lora.targets.values()):
        return  # the forward of experts' adapters is tested on ranks, above
    ids = token_batch(1)
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids=ids, use_cache=False).logits, adapted(input_ids=ids, use_cache=False).logits
        )


def test_adapters_with_layers_to_transform_are_those_of_peft(tmp_path):
    folder = save_qwen3_moe(tmp_path / "model")
    for pattern in (None, ["layers"]):
        chosen = {"layers_to_transform": [1], "layers_pattern": pattern}
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **chosen)
        keys = get_peft_model_state_dict(get_peft_model(reference_model(folder), config)).keys()
        settings = lora_settings(target_modules=["q_proj", "v_proj"], lora=chosen)
        assert set(peft_names(Lora(reference_model(folder), settings)).values()) == set(keys)
    assert all(".layers.1." in key for key in keys)
