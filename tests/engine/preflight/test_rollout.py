"""Sync modes and parallel sizes that vLLM and SGLang can or can't take."""

import copy
import json
import re

import pytest

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight.run import check_run, check_training
from epfsdp2.rollout.sglang.server import SGLANG_LOADER
from epfsdp2.rollout.vllm.server import check_graphs
from tests.support.models.quantised import COMPRESSED
from tests.support.trainer.preflight import BACKEND, MODEL, SDPA, TENSOR_PARALLEL, VLLM, paragraph, rollout
from tests.support.trainer.settings import checkpoint, engine


def test_rollout_of_any_kind_gets_full_tensors_and_only_vllm_slices(model, installs, caplog):
    road = {"name": "vllm", "update_weights_bucket_megabytes": 1024}
    for backend in ("naive", "nccl", "epfsdp2_p2p", "delta_sharded", None):
        check_run(engine(), 2, model, road | {"backend": backend}, device="cpu")
    check_run(engine(), 2, model, {"name": None}, device="cpu")
    installs("sglang", "0.5.12")
    check_run(engine(), 2, model, road | {"name": "sglang"}, device="cpu")
    assert "nobody has run" not in caplog.text
    check_run(engine(rollout_sync="full"), 2, model, road | {"name": "trtllm", "backend": "nccl"}, device="cpu")
    assert "nobody has run this engine with actor_rollout_ref.rollout.name=trtllm" in caplog.text
    for name, settings, backend, setting, value in (
        ("sglang", {"rollout_sync": "sliced"}, "naive", "engine.rollout_sync", "sliced"),
        ("trtllm", {}, "epfsdp2_p2p", "actor_rollout_ref.rollout.checkpoint_engine.backend", "epfsdp2_p2p"),
    ):
        with pytest.raises(SettingError) as caught:
            check_run(engine(**settings), 2, model, road | {"name": name, "backend": backend}, device="cpu")
        paragraph(caught.value, setting, value)


@pytest.mark.parametrize(
    "argument, value", [("tp_size", 2), ("dp_size", 2), ("pp_size", 2), ("ep_size", 2)], ids=lambda it: str(it)
)
def test_sglang_sizes_among_its_arguments_that_contradict_verls_are_refused(model, installs, argument, value):
    installs("sglang", "0.5.12")
    setting = f"actor_rollout_ref.rollout.engine_kwargs.sglang.{argument}"
    check_run(engine(), 2, model, {"name": "sglang", "engine_kwargs": {"sglang": {argument: 1}}}, device="cpu")
    with pytest.raises(SettingError) as caught:
        check_run(engine(), 2, model, {"name": "sglang", "engine_kwargs": {"sglang": {argument: value}}}, device="cpu")
    paragraph(caught.value, setting, value)


def test_sglang_slices_that_it_can_not_cut_are_refused(model, installs):
    installs("sglang", "0.5.12")
    kwargs = {"sglang": {"custom_weight_loader": [SGLANG_LOADER]}}
    rollout = {"name": "sglang", "backend": "epfsdp2_p2p", "tensor_model_parallel_size": 3, "engine_kwargs": kwargs}
    with pytest.raises(SettingError) as caught:
        check_run(engine(), 2, model, rollout, device="cpu")
    text = paragraph(caught.value, "actor_rollout_ref.rollout.tensor_model_parallel_size", 3)
    assert "SGLang can't cut this model so" in text


@pytest.mark.parametrize(
    "family, words", [("minimax", "without the state of its attention"), ("ernie4_5_vl_moe", "reads the flat config")]
)
def test_family_that_vllm_can_not_serve_is_refused_with_vllm_alone(tmp_path, family, words, installs):
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"text_config": sizes} if family == "ernie4_5_vl_moe" else sizes
    folder = checkpoint(tmp_path / family, family, **sizes)
    installs("vllm", "0.27.1")
    with pytest.raises(SettingError) as caught:
        check_run(engine(), 2, folder, rollout(), device="cpu")
    assert words in paragraph(caught.value, MODEL, family)
    check_run(engine(), 2, folder, {"name": None}, device="cpu")


def test_class_that_vllm_can_not_run_is_refused_with_the_one_that_it_can(tmp_path):
    """Phi-3.5-MoE as transformers saves it; published checkpoints name the other class."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    folder = checkpoint(tmp_path / "phimoe", "phimoe", **sizes)
    given = {"hf_overrides": {"architectures": ["PhimoeForCausalLM"]}}
    with pytest.raises(SettingError) as caught:
        check_run(engine(), 2, folder, rollout(vllm=given), device="cpu")
    setting = f"{VLLM}.hf_overrides.architectures"
    text = paragraph(caught.value, setting, "['PhimoeForCausalLM']")
    assert text.endswith(f"What works: {setting}=[PhiMoEForCausalLM]")
    given["hf_overrides"]["architectures"] = ["PhiMoEForCausalLM"]
    check_run(engine(), 2, folder, rollout(vllm=given), device="cpu")


def test_class_whose_layout_is_not_known_in_an_old_vllm_is_refused_where_slices_are_sent(tmp_path, installs):
    """K-EXAONE as its checkpoints were spelled at first, for which vLLM 0.24 has code of its own."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    folder = checkpoint(tmp_path / "exaone", "exaone_moe", **sizes)
    given = rollout(vllm={"hf_overrides": {"architectures": ["ExaoneMoEForCausalLM"]}})
    installs("vllm", "0.24.0")
    with pytest.raises(SettingError) as caught:
        check_run(engine(), 2, folder, given, device="cpu")
    setting = f"{VLLM}.hf_overrides.architectures"
    text = paragraph(caught.value, setting, "['ExaoneMoEForCausalLM']")
    assert text.endswith(f"What works: {setting}=[ExaoneMoeForCausalLM], or engine.rollout_sync=full")
    check_run(engine(rollout_sync="full"), 2, folder, given, device="cpu")
    check_run(engine(), 2, folder, rollout(), device="cpu")
    installs("vllm", "0.27.1")
    check_run(engine(), 2, folder, given, device="cpu")


def test_check_graphs_with_latent_attention_in_an_old_vllm_is_refused(tmp_path, model, installs):
    latent = checkpoint(tmp_path / "latent", "deepseek_v3", num_hidden_layers=2, first_k_dense_replace=1)
    facts, plain = (check_training(engine(), 2, model, device="cpu").model.config for model in (latent, model))
    installs("vllm", "0.24.0")
    for graphs in ({}, {"enforce_eager": False}):
        with pytest.raises(SettingError) as caught:
            check_graphs(graphs, facts, "cuda")
    text = paragraph(caught.value, "actor_rollout_ref.rollout.enforce_eager", False)
    assert "vllm 0.24.0 allocates" in text and text.endswith("enforce_eager=True, or vllm>=0.27.1")
    for works in (
        ({"enforce_eager": True}, facts, "cuda"),
        ({}, facts, "cpu"),
        ({}, plain, "cuda"),
        ({}, None, "cuda"),
    ):
        check_graphs(*works)
    installs("vllm", "0.27.1")
    check_graphs({}, facts, "cuda")


@pytest.mark.parametrize("wanted", ["full", "auto", "sliced"])
def test_rollout_sync_that_the_rollout_takes_passes(model, wanted):
    expert_parallel = rollout(2, data_parallel_size=2, expert_parallel_size=4)
    check_run(engine(rollout_sync=wanted), 8, model, expert_parallel, device="cpu")
    check_run(engine(rollout_sync=wanted), 8, model, rollout(), device="cpu")


OBSTACLES = [
    ({"vllm": {"worker_extension_cls": "theirs.Extension"}}, f"{VLLM}.worker_extension_cls=theirs.Extension"),
    ({"engine_kwargs": None}, f"{VLLM}.worker_extension_cls=None"),
    ({"vllm": {"expert_placement_strategy": "round_robin"}}, f"{VLLM}.expert_placement_strategy=round_robin"),
    ({"pipeline_model_parallel_size": 2}, "actor_rollout_ref.rollout.pipeline_model_parallel_size=2"),
    ({"disaggregation": {"enabled": True}}, "actor_rollout_ref.rollout.disaggregation.enabled=True"),
    ({"quantization": "torchao"}, "actor_rollout_ref.rollout.quantization=torchao"),
    ({"vllm": {"quantization": "fp8"}}, f"{VLLM}.quantization=fp8"),
    ({"qat": {"enable": True}}, "actor_rollout_ref.rollout.qat.enable=True"),
    ({"backend": "nccl"}, f"{BACKEND}=nccl"),
]


@pytest.mark.parametrize("settings, named", OBSTACLES)
def test_rollout_sync_that_the_rollout_can_not_take_is_refused_by_name_alone(model, settings, named):
    placed = rollout(2, **{"data_parallel_size": 2, "expert_parallel_size": 4, **settings})
    with pytest.raises(SettingError) as caught:
        check_run(engine(rollout_sync="sliced"), 8, model, placed, device="cpu")
    text = paragraph(caught.value, "engine.rollout_sync", "sliced")
    assert f"can't be with {named}: " in text and "What works: engine.rollout_sync=auto, or " in text
    for other in ("auto", "full"):
        check_run(engine(rollout_sync=other), 8, model, placed, device="cpu")


@pytest.mark.parametrize(
    ("backend", "wanted", "quantization", "why"),
    [
        ("nccl", "auto", "fp8", "takes checkpoints' names, and .*=nccl carries others"),
        ("delta_sharded", "auto", "fp8", "sends changed elements alone, and scales are of all elements of a block"),
        ("epfsdp2_p2p", "full", "fp8", "takes checkpoints' names, and .*=epfsdp2_p2p carries others"),
        ("epfsdp2_p2p", "auto", "torchao", "carries others. No slices are sent: .*=torchao: vLLM quantises"),
    ],
)
def test_quantised_rollout_away_from_the_trainer_that_gets_no_slices_is_refused(
    model, backend, wanted, quantization, why
):
    placed = rollout(quantization=quantization, backend=backend)
    check_run(engine(rollout_sync="full"), 8, model, {**placed, "backend": "naive"}, device="cpu")
    with pytest.raises(SettingError, match=why) as caught:
        check_run(engine(rollout_sync=wanted), 8, model, placed, device="cpu")
    text = paragraph(caught.value, "actor_rollout_ref.rollout.quantization", quantization)
    assert text.endswith(f"What works: {BACKEND}=naive, or actor_rollout_ref.rollout.quantization=null")


@pytest.mark.parametrize(
    ("wanted", "changes", "why"),
    [
        ("auto", {"strategy": "tensor"}, "quantise fused weights with one scale for each tensor anew"),
        ("full", {}, "its values and scales are sent in slices alone"),
    ],
)
def test_compressed_rollout_that_would_get_full_tensors_is_refused(model, wanted, changes, why):
    asked = copy.deepcopy(COMPRESSED["int8"])
    check_run(engine(), 8, model, rollout(vllm={"hf_overrides": {"quantization_config": asked}}), device="cpu")
    asked["config_groups"]["group_0"]["weights"] |= changes
    placed = rollout(vllm={"hf_overrides": {"quantization_config": asked}})
    with pytest.raises(SettingError, match="full tensors have no scales: .*" + why):
        check_run(engine(rollout_sync=wanted), 8, model, placed, device="cpu")


def test_quantised_rollout_with_slices_that_cut_blocks_is_refused(tmp_path, model):
    with pytest.raises(SettingError, match=r"tensor_model_parallel_size=2: .* blocks of 128 x 128 share a scale"):
        check_run(engine(), 8, model, rollout(quantization="fp8"), device="cpu")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64, "num_experts": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    fits = checkpoint(tmp_path / "fits", "olmoe", **sizes, **heads)
    for backend in ("naive", "epfsdp2_p2p"):
        for wanted in ("auto", "sliced"):
            placed = rollout(2, quantization="fp8", backend=backend)
            check_run(engine(rollout_sync=wanted), 8, fits, placed, device="cpu")


def test_overrides_of_the_rollouts_config_are_read_as_json_too(model):
    given = json.dumps({"quantization_config": COMPRESSED["int8"]})
    with pytest.raises(SettingError, match="its values and scales are sent in slices alone"):
        check_run(engine(rollout_sync="full"), 8, model, rollout(vllm={"hf_overrides": given}), device="cpu")


@pytest.mark.parametrize("key", ["ignored_layers", "ignore"])
def test_layers_that_are_not_to_be_quantised_have_to_be_there(model, key):
    layer = "model.layers.1"
    named = [f"{layer}.mlp.gate", f"{layer}.self_attn.qkv_proj", f"{layer}.self_attn.q_proj", "lm_head", "re:.*gate"]
    given = {"quantization_config": {"quant_method": "fp8", key: named}}
    check_run(engine(), 2, model, rollout(vllm={"hf_overrides": given}), device="cpu")
    for name, near in ((f"{layer}.mlp.gatee", f"{layer}.mlp.gate"), ("model.layers.2.mlp.gate", "layers")):
        named.append(name)
        with pytest.raises(SettingError) as caught:
            check_run(engine(), 2, model, rollout(vllm={"hf_overrides": given}), device="cpu")
        text = paragraph(caught.value, f"{VLLM}.hf_overrides.quantization_config.{key}", name)
        assert "has no such layer" in text and near in text.partition("What works: ")[2]
        named.pop()
    with pytest.raises(SettingError, match="hf_overrides.quantization_config=.* needs full tensors"):
        check_run(engine(rollout_sync="sliced"), 2, model, rollout(vllm={"hf_overrides": given}), device="cpu")


def test_rollout_sync_sliced_of_an_unknown_family_or_vllm_is_refused(tmp_path, model, installs, monkeypatch, caplog):
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4}
    other = checkpoint(tmp_path / "other", "mistral4", **sizes, **heads)
    with pytest.raises(SettingError, match="can't be with actor_rollout_ref.model=mistral4: how vLLM cuts it"):
        check_run(engine(rollout_sync="sliced"), 2, other, rollout(1), device="cpu")
    check_run(engine(), 2, other, rollout(1), device="cpu")
    with pytest.raises(SettingError) as caught:
        check_run(engine(), 2, other, rollout(2), device="cpu")
    assert "has no attention" in paragraph(caught.value, TENSOR_PARALLEL, 2)

    # For a model that is not here yet, settings of the rollout are checked.
    later = {"path": "some-org/not-here", **SDPA}
    check_run(engine(rollout_sync="sliced"), 2, later, rollout(), device="cpu")
    with pytest.raises(SettingError, match="quantization=torchao"):
        check_run(engine(rollout_sync="sliced"), 2, later, rollout(quantization="torchao"), device="cpu")

    installs("vllm", "0.25.1")
    with pytest.raises(SettingError, match="vllm 0.25.1 was not tested with; .*a layout may have changed") as caught:
        check_run(engine(rollout_sync="sliced"), 2, model, rollout(), device="cpu")
    assert paragraph(caught.value, "engine.rollout_sync", "sliced").endswith("engine.rollout_sync=auto")
    check_run(engine(), 2, model, rollout(), device="cpu")


@pytest.mark.parametrize("wanted", ["auto", "full", "sliced"])
@pytest.mark.parametrize(
    "settings, setting, value, words",
    [
        ({"vllm": {"enable_eplb": True}}, f"{VLLM}.enable_eplb", True, "silently wrong"),
        ({"vllm": {"tensor_parallel_size": 4}}, f"{VLLM}.tensor_parallel_size", 4, "feeds the wrong ones"),
        ({"vllm": {"pipeline_parallel_size": 2}}, f"{VLLM}.pipeline_parallel_size", 2, "feeds the wrong ones"),
        ({"vllm": {"data_parallel_size": 2}}, f"{VLLM}.data_parallel_size", 2, "feeds the wrong ones"),
        ({"expert_parallel_size": 3}, "actor_rollout_ref.rollout.expert_parallel_size", 3, "all 2 workers"),
        ({"data_parallel_size": 0}, "actor_rollout_ref.rollout.data_parallel_size", 0, "at least 1"),
        ({"tp": 3}, TENSOR_PARALLEL, 3, "the 8 trainer ranks are not a multiple"),
        ({"tp": 2, "data_parallel_size": 8}, TENSOR_PARALLEL, 2, "takes 16 workers"),
        ({"tp": 4}, TENSOR_PARALLEL, 4, "vLLM can't cut 2 attention heads so. What works: .* one of [1, 2]"),
    ],
)
def test_rollout_that_no_sync_reaches_is_refused(model, wanted, settings, setting, value, words):
    with pytest.raises(SettingError) as caught:
        check_run(engine(rollout_sync=wanted), 8, model, rollout(**settings), device="cpu")
    assert re.search(words.replace("[", r"\["), paragraph(caught.value, setting, value))


@pytest.mark.parametrize(
    "sizes, tp, words",
    [
        ({"num_attention_heads": 6, "moe_intermediate_size": 48}, 3, "a vocabulary of 64, padded to 64 "),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "4 key-value heads"),
        (
            {"num_attention_heads": 8, "moe_intermediate_size": 4},
            8,
            "intermediate size 4 of an expert",
        ),
        ({"num_attention_heads": 16, "num_experts": 8}, 16, "8 experts"),
    ],
)
def test_tensor_parallel_size_that_vllm_can_not_shard_by_is_refused(model, sizes, tp, words):
    model["override_config"] |= sizes
    with pytest.raises(SettingError) as caught:
        check_run(engine(), 48, model, rollout(tp), device="cpu")
    assert words in paragraph(caught.value, TENSOR_PARALLEL, tp)
    # With as many ranks as heads and fewer key-value heads, neighbours hold the same one.
    check_run(engine(), 48, model, rollout(2), device="cpu")


def test_tensor_parallel_size_with_data_parallel_workers_counts_them_for_experts(model):
    model["override_config"] |= {"moe_intermediate_size": 6}
    with pytest.raises(SettingError) as caught:
        check_run(engine(), 8, model, rollout(1, data_parallel_size=4), device="cpu")
    text = paragraph(caught.value, TENSOR_PARALLEL, 1)
    assert "the intermediate size 6 of an expert, in 4 parts" in text
    assert text.endswith("What works: actor_rollout_ref.rollout.expert_parallel_size=4")
    check_run(engine(), 8, model, rollout(1, data_parallel_size=4, expert_parallel_size=4), device="cpu")


def test_transfer_plan_of_a_dense_part_that_does_not_divide_refuses_it(model):
    model["override_config"] |= {"intermediate_size": 33, "mlp_only_layers": [0]}
    with pytest.raises(SettingError, match=r"gate_proj.weight has 33 along dim 0, which tensor parallelism 2"):
        check_run(engine(), 2, model, rollout(), device="cpu")
    check_run(engine(), 2, model, rollout(1), device="cpu")
