"""Import of checkpoints of verl's own fsdp2 engine: equal bit for bit, and training continues as in verl."""

import json
import os
import shutil
import zipfile

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForTokenClassification

from epfsdp2.engine.checkpoint import state as checkpoint
from epfsdp2.engine.optim.lr_scheduler import MultiLRScheduler
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.recipes import import_fsdp2
from tests.parity import families
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import VOCAB, reference_model, save_qwen3_moe, token_loss
from tests.support.ranks import run_ranks

STEP, WORLD = "global_step_2", 3
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def _batch():
    ids = torch.randint(0, VOCAB, (12, 11), generator=torch.Generator().manual_seed(3))
    return ids.chunk(dist.get_world_size())[dist.get_rank()]


def _adamw(params, lr=1e-3):
    # With a small eps, AdamW's first steps would magnify rounding errors of tiny gradients.
    return torch.optim.AdamW(params, lr=lr, eps=1e-4)


def _schedule(optimizer):
    from verl.utils.torch_functional import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=10, min_lr_ratio=0.1)


def _value_loss(model, ids):
    return model(input_ids=ids, use_cache=False).logits.square().mean()


def _step(model, optimizer, schedule, loss=token_loss):
    optimizer.zero_grad()
    loss(model, _batch()).backward()
    optimizer.step()
    schedule.step()


def _whole(tensors):
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors}


def _saves_with_verl(folder, out, fsdp_size=-1, value_model=False):
    """Train two steps like verl's fsdp2 engine and save its checkpoint; also save its contents and a third step."""
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.utils.fsdp_utils import apply_fsdp2
    from verl.workers.engine.fsdp.utils import create_device_mesh

    model, loss = (_value_model(folder), _value_loss) if value_model else (reference_model(folder), token_loss)
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=True)
    mesh = create_device_mesh(dist.get_world_size(), fsdp_size)
    apply_fsdp2(model, {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": True}, {})
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    optimizer = _adamw(model.parameters())
    schedule = _schedule(optimizer)
    for _ in range(2):
        _step(model, optimizer, schedule, loss)
    FSDPCheckpointManager(model, optimizer, schedule).save_checkpoint(str(out), global_step=2)
    names = {param: name for name, param in model.named_parameters()}
    facts = {
        "saved": _whole(model.named_parameters()),
        "moments": {
            names[param]: _whole((key, entries[key]) for key in MOMENTS) for param, entries in optimizer.state.items()
        },
        "rates": schedule.get_last_lr(),
        "random": torch.get_rng_state(),
    }
    _step(model, optimizer, schedule, loss)
    facts |= {"after": _whole(model.named_parameters()), "rates after": schedule.get_last_lr()}
    if dist.get_rank() == 0:
        torch.save(facts, _facts_of(out))


def _value_model(folder):
    """Return the model of verl's value engine; its head is drawn from one seed on all ranks."""
    torch.manual_seed(5)
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    return AutoModelForTokenClassification.from_pretrained(
        folder, config=config, dtype=torch.float32, experts_implementation="eager"
    )


def _facts_of(out):
    return out.parent.parent / f"{out.name}.pt"


def _resumes(folder, saved, facts):
    model, _ = sharded_model(folder, dist.get_world_size(), ep=2)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer = build_multi_optimizer(model, lambda params: _adamw(params, lr=1.0))
    schedule = MultiLRScheduler(optimizer, _schedule)
    checkpoint.load_checkpoint(saved, model, optimizer, schedule, {"model", "optimizer", "extra"})
    verls = torch.load(facts)
    parameters = _whole(_under_plain_names(model, model.named_parameters()))
    assert parameters.keys() == verls["saved"].keys()
    assert all(torch.equal(tensor, verls["saved"][name]) for name, tensor in parameters.items())
    state = dict(_under_plain_names(model, optimizer.state_dict()["state"].items()))
    assert state.keys() == verls["moments"].keys()
    for name, entries in state.items():
        moments = _whole(entries.items())
        assert moments.keys() == set(MOMENTS)
        assert all(torch.equal(moments[key], verls["moments"][name][key]) for key in MOMENTS), name
    assert schedule.last_epoch == 2 and set(schedule.get_last_lr()) == set(verls["rates"])
    assert {group["lr"] for group in optimizer.param_groups} == set(verls["rates"])
    assert all(group["eps"] == 1e-4 for group in optimizer.param_groups)
    if dist.get_rank() == 0:
        assert torch.equal(torch.get_rng_state(), verls["random"])
    _step(model, optimizer, schedule)
    assert set(schedule.get_last_lr()) == set(verls["rates after"])
    for name, tensor in _whole(_under_plain_names(model, model.named_parameters())).items():
        torch.testing.assert_close(tensor, verls["after"][name], rtol=1e-5, atol=1e-6, msg=name)
        assert not torch.equal(tensor, verls["saved"][name]), name


def _under_plain_names(model, named):
    return ((families.plain_name(model, name), value) for name, value in named)


def _imported(out):
    return {name: t for file in (out / checkpoint.SHARDS).glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.fixture(scope="module")
def verls(tmp_path_factory):
    """A checkpoint of three ranks, which divide few tensors evenly; the model is beside it."""
    folder = tmp_path_factory.mktemp("verl")
    saved = folder / STEP / "actor"
    run_ranks(_saves_with_verl, WORLD, save_qwen3_moe(folder / "model"), saved)
    return saved


def test_import_of_a_run_of_verls_goes_on_here(verls, tmp_path):
    out = tmp_path / STEP / "actor"
    base = tmp_path / "base"
    base.mkdir()
    (base / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')  # verl does not save it
    assert import_fsdp2.main([str(verls), str(out), "--base", str(base)]) == 0
    generation = out / "huggingface/generation_config.json"
    assert generation.read_bytes() == (base / "generation_config.json").read_bytes()
    assert json.loads((out / "trainer_state.json").read_text())["step"] == 2
    assert (out / "huggingface/config.json").read_text() == (verls / "huggingface/config.json").read_text()
    assert [path.name for path in out.parent.iterdir()] == ["actor"]
    run_ranks(_resumes, 2, verls.parent.parent / "model", out, _facts_of(verls))


def _is_what_was_saved(out, saved):
    facts, found = torch.load(_facts_of(saved)), _imported(out)
    expected = {f"model.{name}": tensor for name, tensor in facts["saved"].items()} | {
        f"optimizer.{name}.{key}": tensor for name, of in facts["moments"].items() for key, tensor in of.items()
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _save_three(folder, family, step):
    _saves_with_verl(folder, step / "actor", 2)
    _saves_with_verl(folder, step / "critic", 2, value_model=True)
    _saves_with_verl(family, step / "family", 2)


def test_import_takes_replicas_and_tied_parameters_once_and_renames_a_family_that_the_engine_brings(tmp_path):
    """The family's experts have other names than in transformers, and another place among the parameters."""
    tied = save_qwen3_moe(tmp_path / "model", tie_word_embeddings=True)
    run_ranks(_save_three, 4, tied, families.save("granitemoe", tmp_path / "granite"), tmp_path / STEP)
    for role in ("actor", "critic", "family"):
        assert import_fsdp2.main([str(tmp_path / STEP / role), str(tmp_path / "out" / role)]) == 0
    for role, has, loads_it in (
        ("actor", "model.model.norm.weight", "Qwen3MoeForCausalLM"),
        ("critic", "model.score.weight", "Qwen3MoeForTokenClassification"),
    ):
        out = tmp_path / "out" / role
        _is_what_was_saved(out, tmp_path / STEP / role)
        assert has in _imported(out) and "model.lm_head.weight" not in _imported(out)
        assert AutoConfig.from_pretrained(out / "huggingface").architectures == [loads_it]
    found, facts = _imported(tmp_path / "out/family"), torch.load(_facts_of(tmp_path / STEP / "family"))
    own, theirs = "block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"
    own, theirs = (f"model.layers.0.{name}" for name in (own, theirs))
    if theirs not in facts["saved"]:  # from transformers 5.19 on it is on the interface
        theirs = own
    assert torch.equal(found[f"model.{own}"], facts["saved"][theirs])
    assert all(torch.equal(found[f"optimizer.{own}.{key}"], facts["moments"][theirs][key]) for key in MOMENTS)


def _as_from_a_gpu(path):
    """Replace ``cpu`` by ``cuda:0`` everywhere in a file."""
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            if name.endswith("data.pkl"):
                assert b"X\x03\0\0\0cpu" in content
                content = content.replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0")
            file.writestr(name, content)


def test_import_without_a_gpu_reads_what_one_wrote(verls, tmp_path):
    saved, out = shutil.copytree(verls, tmp_path / STEP / "actor"), tmp_path / "out"
    random = torch.arange(16, dtype=torch.uint8)
    _rewrite(saved, "extra_state", lambda extra: extra["rng"].update(cuda=random))
    for kind in ("model", "optim"):
        for rank in range(WORLD):
            _as_from_a_gpu(_rank_file(saved, kind, rank))
    assert import_fsdp2.main([str(saved), str(out)]) == 0
    _is_what_was_saved(out, verls)
    assert torch.equal(load_file(out / "rng/00001.safetensors")["device"], random)


def test_import_of_weights_alone_says_what_is_missing(verls, tmp_path, capsys):
    saved, out = shutil.copytree(verls, tmp_path / STEP / "actor"), tmp_path / "out"
    for kind in ("optim", "extra_state"):
        for rank in range(WORLD):
            _rank_file(saved, kind, rank).unlink()
    assert import_fsdp2.main([str(saved), str(out)]) == 0
    told = capsys.readouterr().err
    assert "holds no optimizer state" in told and "holds no learning-rate schedule" in told
    parameters = torch.load(_facts_of(verls))["saved"]
    assert _imported(out).keys() == {f"model.{name}" for name in parameters}
    facts = json.loads((out / "trainer_state.json").read_text())
    assert facts == {"step": 2, "lr_scheduler": None, "param_groups": None}


def _is_refused(saved, out, capsys, *words):
    before = sorted(out.parent.rglob("*"))
    assert import_fsdp2.main([str(saved), str(out)]) == 1
    told = capsys.readouterr().err
    assert all(word in told for word in words), told
    assert sorted(out.parent.rglob("*")) == before


def _rank_file(saved, kind, rank=1):
    return saved / f"{kind}_world_size_{WORLD}_rank_{rank}.pt"


class _Runs:
    """An object that runs a command when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def _rewrite(saved, kind, change, ranks=range(WORLD)):
    """Apply ``change`` to the ranks' saved files, in place."""
    for rank in ranks:
        state = torch.load(_rank_file(saved, kind, rank), weights_only=False)
        change(state)
        torch.save(state, _rank_file(saved, kind, rank))


def _lacks(kind):
    return lambda saved: _rank_file(saved, kind).unlink()


def _rewritten(kind, change, ranks=range(WORLD)):
    return lambda saved: _rewrite(saved, kind, change, ranks)


def _runs_a_command(saved):
    torch.save({"state": {}, "param_groups": [_Runs(f"touch {saved.parent / 'executed'}")]}, _rank_file(saved, "optim"))


def _flipped(saved):
    path = _rank_file(saved, "optim")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut_off(saved):
    path = _rank_file(saved, "extra_state", 0)
    path.write_bytes(path.read_bytes()[:-100])


def _tied(saved):
    config = json.loads((saved / "huggingface/config.json").read_text())
    (saved / "huggingface/config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


def _of_another_model(saved):
    shutil.rmtree(saved / "huggingface")
    save_qwen3_moe(saved / "huggingface", hidden_size=32)


OF_FSDP1 = json.dumps({"FSDP_version": 1, "world_size": WORLD})
FIRST = {kind: f"{kind}_world_size_3_rank_0.pt" for kind in ("model", "optim", "extra_state")}
SECOND = {kind: f"{kind}_world_size_3_rank_1.pt" for kind in FIRST}
OTHER = "model_world_size_4_rank_3.pt"
ADAPTER = {"layers.0.q_proj.lora_A.weight": torch.ones(1)}


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda saved: (saved / "fsdp_config.json").unlink(), ["holds no fsdp_config.json"]),
        (_lacks("model"), ["is not complete", f"lacks {SECOND['model']}"]),
        (_lacks("optim"), ["is not complete", f"lacks {SECOND['optim']}"]),
        (lambda saved: shutil.copy(_rank_file(saved, "model"), saved / OTHER), ["is of 3 ranks", OTHER]),
        (lambda saved: (saved / "fsdp_config.json").write_text(OF_FSDP1), ["is of FSDP version 1"]),
        (_runs_a_command, [f"{SECOND['optim']} is refused: it would call posix.system"]),
        (_flipped, [f"{SECOND['optim']} is damaged: the checksum"]),
        (_cut_off, [f"{FIRST['extra_state']} is damaged"]),
        (_of_another_model, [f"{FIRST['model']} to model_world_size_3_rank_2.pt are not of the model", "more"]),
        (_tied, ["lm_head.weight is tied to model.embed_tokens.weight"]),
        (_rewritten("model", lambda state: state.update(ADAPTER)), [f"{FIRST['model']} holds LoRA adapters"]),
        (
            _rewritten("optim", lambda optimizer: optimizer["param_groups"][0]["params"].reverse()),
            [f"{FIRST['optim']} to", "model.norm.weight.exp_avg is (64, 64)", "more"],
        ),
        (
            _rewritten("optim", lambda optimizer: optimizer["param_groups"][0].pop("amsgrad")),
            [f"{FIRST['optim']} does not say whose state it is", "--optimizer"],
        ),
        (
            _rewritten("optim", lambda optimizer: optimizer["state"][0]["step"].add_(1), [1]),
            ["step in", f"{SECOND['optim']} is another one"],
        ),
    ],
)
def test_import_of_bad_input_names_it_and_leaves_nothing(verls, tmp_path, capsys, spoil, words):
    saved, out = tmp_path / STEP / "actor", tmp_path / "out/actor"
    shutil.copytree(verls, saved)
    spoil(saved)
    out.parent.mkdir()
    _is_refused(saved, out, capsys, *words)
    assert not (saved.parent / "executed").exists()


def test_import_into_a_full_folder_or_of_an_unknown_step_is_refused(verls, tmp_path, capsys):
    out = tmp_path / "out/actor"
    out.mkdir(parents=True)
    _is_refused(verls, out, capsys, "is there already")
    saved = shutil.copytree(verls, tmp_path / "nowhere/actor")
    _is_refused(saved, tmp_path / "out/other", capsys, "--step")
    assert import_fsdp2.main([str(saved), str(tmp_path / "out/other"), "--step", "7", "--optimizer", "Lion"]) == 0
    facts = json.loads((tmp_path / "out/other/trainer_state.json").read_text())
    assert facts["step"] == 7 and {group["algorithm"] for group in facts["param_groups"]} == {"Lion"}
    assert set(facts["lr_scheduler"]) == {"dense", "experts"}
