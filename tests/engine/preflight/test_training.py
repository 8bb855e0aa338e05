"""Wrong training settings are refused in one paragraph with setting, value, rule and a value that works."""

import pytest

from epfsdp2.engine.checkpoint.atomic_folder import MANIFEST
from epfsdp2.engine.config.values import OPTIMIZERS
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight.cut_experts import check_cut_experts_sync
from epfsdp2.engine.preflight.model_facts import largest_sent
from epfsdp2.engine.preflight.run import check_run, check_training
from epfsdp2.engine.topology.expert_placement import EtpDim
from tests.parity.families import save
from tests.support.trainer.preflight import MODEL, SDPA, paragraph
from tests.support.trainer.settings import TINY, checkpoint, engine, saved_checkpoint

# Elements of the largest tensor of that model: gate_up_proj [E, 2I, D].
GATE_UP = 8 * 2 * 16 * 32


def test_check_training_of_a_valid_run_passes_and_counts_its_experts(model, stacks_are_sent):
    facts = check_training(engine(ep_size=4), 8, model, device="cpu")
    assert facts.experts == (8, 8)
    assert facts.stacked == (((8, 32, 16), 0, EtpDim(2)), ((8, 32, 32), 0, EtpDim(1, parts=2)))
    assert largest_sent(facts.model) == ("model.layers.0.mlp.experts.gate_up_proj", GATE_UP)


@pytest.mark.parametrize("ep_size, world, works", [(3, 8, "[1, 2, 4, 8]"), (4, 6, "[1, 2, 3, 6]"), (8, 4, "[1, 2, 4]")])
def test_ep_size_that_does_not_divide_the_ranks_is_refused(model, ep_size, world, works):
    with pytest.raises(SettingError) as caught:
        check_training(engine(ep_size=ep_size), world, model, device="cpu")
    text = paragraph(caught.value, "engine.ep_size", ep_size)
    assert "number of ranks" in text and works in text


def test_ep_size_that_does_not_divide_the_ranks_of_a_replica_is_refused(model):
    with pytest.raises(SettingError, match=r"engine.ep_size=8: .*engine.fsdp_size=4"):
        check_training(engine(ep_size=8, fsdp_size=4), 16, model, device="cpu")
    with pytest.raises(SettingError, match=r"engine.fsdp_size=3: .*\[1, 2, 4, 8\]"):
        check_training(engine(fsdp_size=3), 8, model, device="cpu")


def test_ep_size_that_does_not_divide_the_experts_is_refused(tmp_path):
    model = checkpoint(tmp_path)
    model["override_config"]["num_experts"] = 6
    with pytest.raises(SettingError) as caught:
        check_training(engine(ep_size=4), 12, model, device="cpu")
    text = paragraph(caught.value, "engine.ep_size", 4)
    assert "number of experts" in text and "6 in Qwen3MoeForCausalLM" in text and "[1, 2, 3, 6]" in text


def test_etp_size_that_does_not_fit_is_refused_with_those_that_do(model):
    check_training(engine(ep_size=2, etp_size=2), 8, model, device="cpu")
    with pytest.raises(SettingError) as caught:
        check_training(engine(ep_size=4, etp_size=4), 8, model, device="cpu")
    assert "engine.etp_size= one of [1, 2]" in paragraph(caught.value, "engine.etp_size", 4)
    with pytest.raises(SettingError) as caught:  # the inner size is 16
        check_training(engine(etp_size=32), 32, model, device="cpu")
    assert "engine.etp_size= one of [1, 2, 4, 8, 16]" in paragraph(caught.value, "engine.etp_size", 32)


def test_etp_size_with_settings_that_exclude_it_is_refused(model):
    cut = engine(ep_size=2, etp_size=2)
    muon = {"optimizer": "Muon", "optimizer_impl": "torch.optim", "lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.99)}
    check_training(cut, 8, model, optim=muon, device="cpu")
    with pytest.raises(SettingError) as caught:
        check_training(engine(ep_size=8, etp_size=2), 64, model, optim=muon, device="cpu")
    paragraph(caught.value, f"{OPTIMIZERS[MODEL]}.optimizer", "Muon")
    with pytest.raises(SettingError) as caught:
        check_cut_experts_sync(cut, {"backend": "delta_sharded"})
    paragraph(caught.value, "actor_rollout_ref.rollout.checkpoint_engine.backend", "delta_sharded")
    check_cut_experts_sync(cut, {"backend": "naive"})
    adapters = {**model, "lora_rank": 8, "target_modules": "all-linear"}
    check_training(cut, 8, adapters, optim=muon, device="cpu")
    with pytest.raises(SettingError) as caught:
        check_training(engine(ep_size=8, etp_size=2), 64, adapters, device="cpu", optim=muon)
    paragraph(caught.value, f"{OPTIMIZERS[MODEL]}.optimizer", "Muon")


@pytest.mark.parametrize("setting, optim", OPTIMIZERS.items())
def test_optimizer_that_needs_whole_weights_is_refused_in_every_role(model, setting, optim):
    settings = {"optimizer": "Adafactor", "lr": 1e-6, "weight_decay": 0.0, "betas": (0.9, 0.99)}
    with pytest.raises(SettingError) as caught:
        check_training(engine(ep_size=2), 8, model, optim=settings, device="cpu", setting=setting)
    text = paragraph(caught.value, f"{optim}.optimizer", "Adafactor")
    assert "depends on other elements of the weight" in text and f"{optim}.optimizer=AdamW" in text


@pytest.mark.parametrize(
    "dim, ep, world, rest",
    # gate_up_proj [8, 32, 32], down_proj [8, 32, 16]
    [
        (0, 2, 4, None),
        (0, 8, 8, None),
        (0, 4, 12, 2),
        (0, 2, 32, 4),
        (1, 2, 64, None),
        (1, 2, 6, 32),
        ("auto", 2, 6, None),
    ],
)
def test_expert_shard_dim_that_does_not_divide_is_refused(model, dim, ep, world, rest):
    def check():
        check_training(engine(ep_size=ep, expert_shard_dim=dim), world, model, device="cpu")

    if rest is None:
        return check()
    with pytest.raises(SettingError) as caught:
        check()
    text = paragraph(caught.value, "engine.expert_shard_dim", dim)
    assert f"size {rest} along this dim" in text and f"ep_fsdp={world // ep} " in text


SEQUENCE = "engine.ulysses_sequence_parallel_size"


def test_sequence_parallel_size_that_does_not_fit_is_refused_with_those_that_do(model, tmp_path):
    """The model has two heads."""
    assert check_training(engine(ulysses_sequence_parallel_size=2), 4, model, device="cpu") is not None

    def refused(size, world, model, words, name=SEQUENCE, value=None):
        with pytest.raises(SettingError) as caught:
            check_training(engine(ulysses_sequence_parallel_size=size), world, model, device="cpu")
        assert words in paragraph(caught.value, name, size if value is None else value)

    works = "What works: engine.ulysses_sequence_parallel_size= one of [1, 2]"
    refused(4, 6, model, "has to divide the number of ranks, 6 (dp * sp == 6)")
    refused(4, 4, model, f"has to divide the number of attention heads of Qwen3MoeForCausalLM, 2. {works}")
    unpacked, name = model | {"use_remove_padding": False}, f"{MODEL}.use_remove_padding"
    refused(2, 4, unpacked, f"it is packed rows that are cut ({SEQUENCE}=2). What works: {name}=True", name, "False")
    refused(2, 4, {"path": "hdfs://host/model"} | SDPA | {"use_remove_padding": False}, "packed rows", name, "False")
    linear = {"num_hidden_layers": 2, "num_experts": 8, "layer_types": ["linear_attention", "full_attention"]}
    next_ = checkpoint(tmp_path / "next", "qwen3_next", **{**TINY, **linear})
    assert check_training(engine(ulysses_sequence_parallel_size=2), 4, next_, device="cpu") is not None
    refused(4, 4, next_, f"has to divide the number of attention heads of Qwen3NextForCausalLM, 2. {works}")


@pytest.mark.parametrize("name", ["deepseek_v4", "glm_moe_dsa"])
def test_sequence_parallel_size_of_a_model_with_an_indexer_is_refused(tmp_path, name):
    model = {"path": str(save(name, tmp_path)), "override_config": {"attn_implementation": "eager"}}
    words = rf"^{SEQUENCE}=2: can't be with \w+: an indexer of \w+ chooses among the keys .*What works: {SEQUENCE}=1$"
    with pytest.raises(SettingError, match=words):
        check_training(engine(ulysses_sequence_parallel_size=2), 2, model, device="cpu")


def _resumes(model, root, contents, mode="auto", from_path=None, **rollout):
    resume = {"mode": mode, "from_path": from_path, "folder": str(root), **rollout.pop("resume", {})}
    check_run(engine(), 2, model, {"resume": resume, **rollout}, checkpoint={"load_contents": contents}, device="cpu")


ACTOR, CRITIC = "actor_rollout_ref.actor.checkpoint.load_contents", "critic.checkpoint.load_contents"
ALL = ["model", "optimizer", "extra"]


@pytest.mark.parametrize(
    ("saved", "loaded", "words"),
    [
        (["hf_model"], ["hf_model"], "holds no state to resume from"),
        (["hf_model"], ALL, "holds no state to resume from"),
        (["optimizer", "extra"], ["optimizer", "extra"], "holds no state to resume from"),
        (["model", "hf_model"], ["hf_model"], "is without model"),
        (ALL, ["optimizer", "extra"], "is without model"),
        (ALL, ["extra"], "is without model"),
        (ALL, [], "is without model"),
        (["model", "extra"], ALL, "holds no optimizer state"),
    ],
)
def test_resume_from_a_folder_that_lacks_what_is_loaded_is_refused(model, tmp_path, saved, loaded, words):
    root = tmp_path / "runs"
    step = saved_checkpoint(root, 3, saved)
    for place in ({}, {"mode": "resume_path", "from_path": str(step)}):
        with pytest.raises(SettingError) as caught:
            _resumes(model, root, loaded, **place)
        text = paragraph(caught.value, ACTOR, loaded)
        assert words in text and (f"model.path={step}/actor/huggingface" in text) == (saved == ["hf_model"])
    _resumes(model, root, loaded, mode="disable")
    _resumes(model, tmp_path / "no run yet", loaded)


@pytest.mark.parametrize("loaded", [ALL, ["model"], ["model", "optimizer"], [*ALL, "hf_model"]])
def test_resume_with_the_model_and_any_of_the_rest_passes(model, tmp_path, loaded):
    saved_checkpoint(tmp_path / "runs", 3, ALL)
    _resumes(model, tmp_path / "runs", loaded)


def test_resume_of_a_critic_is_checked_where_the_run_has_one(model, tmp_path):
    root = tmp_path / "runs"
    saved_checkpoint(root, 3, ALL)
    saved_checkpoint(root, 3, ["hf_model"], "critic")
    critic = {"critic_path": model["path"], "resume": {"critic_contents": ["hf_model"]}}
    with pytest.raises(SettingError) as caught:
        _resumes(model, root, ALL, adv_estimator="gae", **critic)
    paragraph(caught.value, CRITIC, ["hf_model"])
    _resumes(model, root, ALL, adv_estimator="grpo", **critic)


def test_resume_from_an_incomplete_or_damaged_folder_is_refused(model, tmp_path):
    root = tmp_path / "runs"
    step = saved_checkpoint(root, 3, ALL)
    (step / "actor/trainer_state.json").write_text("{")
    with pytest.raises(SettingError, match="trainer_state.json is damaged") as caught:
        _resumes(model, root, ALL)
    paragraph(caught.value, "trainer.resume_mode", "auto")
    (step / "actor" / MANIFEST).unlink()
    with pytest.raises(SettingError, match="no complete checkpoint of this engine"):
        _resumes(model, root, ALL)
    (step / "actor").rename(step / "elsewhere")  # such as on another machine
    _resumes(model, root, ALL)
