"""Sync modes and parallel sizes that vLLM and SGLang can or can't take."""

import contextlib
import copy
import json

import pytest

from epfsdp2.engine.compat import versions
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight.run import check_run, check_training
from epfsdp2.rollout.sglang.server import SGLANG_LOADER
from epfsdp2.rollout.vllm.server import check_graphs
from tests.support.models.quantised import COMPRESSED
from tests.support.trainer.preflight import BACKEND, MODEL, SDPA, TENSOR_PARALLEL, VLLM, refused, rollout
from tests.support.trainer.settings import checkpoint, engine

ROLLOUT = "actor_rollout_ref.rollout"
SYNC = "engine.rollout_sync"


def check(model, placed, ranks=2, **settings):
    check_run(engine(**settings), ranks, model, placed, device="cpu")


def test_rollout_of_any_kind_gets_full_tensors_and_only_vllm_slices(model, installs, caplog):
    placed = {"name": "vllm", "update_weights_bucket_megabytes": 1024}
    for backend in ("naive", "nccl", "epfsdp2_p2p", "delta_sharded", None):
        check(model, placed | {"backend": backend})
    check(model, {"name": None})
    installs("sglang", "0.5.12")
    check(model, placed | {"name": "sglang"})
    assert "nobody has run" not in caplog.text
    check(model, placed | {"name": "trtllm", "backend": "nccl"}, rollout_sync="full")
    assert f"nobody has run this engine with {ROLLOUT}.name=trtllm" in caplog.text
    with refused(SYNC, "sliced"):
        check(model, placed | {"name": "sglang", "backend": "naive"}, rollout_sync="sliced")
    with refused(BACKEND, "epfsdp2_p2p"):
        check(model, placed | {"name": "trtllm", "backend": "epfsdp2_p2p"})


@pytest.mark.parametrize("argument", ["tp_size", "dp_size", "pp_size", "ep_size"])
def test_sglang_sizes_among_its_arguments_that_contradict_verls_are_refused(model, installs, argument):
    installs("sglang", "0.5.12")
    check(model, {"name": "sglang", "engine_kwargs": {"sglang": {argument: 1}}})
    with refused(f"{ROLLOUT}.engine_kwargs.sglang.{argument}", 2):
        check(model, {"name": "sglang", "engine_kwargs": {"sglang": {argument: 2}}})


def test_sglang_slices_that_it_can_not_cut_are_refused(model, installs):
    installs("sglang", "0.5.12")
    kwargs = {"sglang": {"custom_weight_loader": [SGLANG_LOADER]}}
    with refused(TENSOR_PARALLEL, 3, "SGLang can't cut this model so"):
        placed = {"name": "sglang", "backend": "epfsdp2_p2p", "tensor_model_parallel_size": 3}
        check(model, {**placed, "engine_kwargs": kwargs})


@pytest.mark.parametrize(
    ("family", "words"),
    [("minimax", "without the state of its attention"), ("ernie4_5_vl_moe", "reads the flat config")],
)
def test_family_that_vllm_can_not_serve_is_refused_with_vllm_alone(tmp_path, family, words, installs):
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"text_config": sizes} if family == "ernie4_5_vl_moe" else sizes
    folder = checkpoint(tmp_path / family, family, **sizes)
    installs("vllm", "0.27.1")
    with refused(MODEL, family, words):
        check(folder, rollout())
    check(folder, {"name": None})


@pytest.mark.parametrize(
    ("family", "version", "wrong", "right", "otherwise"),
    [
        # Phi-3.5-MoE as transformers saves it; published checkpoints name the other class.
        ("phimoe", "0.27.1", "PhimoeForCausalLM", "PhiMoEForCausalLM", ""),
        # K-EXAONE as its checkpoints were spelled at first, for which vLLM 0.24 has code of its own.
        ("exaone_moe", "0.24.0", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", f", or {SYNC}=full"),
    ],
)
def test_class_that_vllm_can_not_run_is_refused_with_the_one_that_it_can(
    tmp_path, installs, family, version, wrong, right, otherwise
):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    folder = checkpoint(tmp_path / family, family, **sizes)

    def named(name):
        return rollout(vllm={"hf_overrides": {"architectures": [name]}})

    installs("vllm", version)
    setting = f"{VLLM}.hf_overrides.architectures"
    with refused(setting, [wrong], works=f"What works: {setting}=[{right}]{otherwise}"):
        check(folder, named(wrong))
    check(folder, named(right))
    if otherwise:
        check(folder, named(wrong), rollout_sync="full")
        installs("vllm", "0.27.1")
        check(folder, named(wrong))


def test_check_graphs_with_latent_attention_in_an_old_vllm_is_refused(tmp_path, model, installs):
    latent = checkpoint(tmp_path / "latent", "deepseek_v3", num_hidden_layers=2, first_k_dense_replace=1)
    facts, plain = (check_training(engine(), 2, model, device="cpu").model.config for model in (latent, model))
    installs("vllm", "0.24.0")
    works = "enforce_eager=True, or vllm>=0.27.1"
    for graphs in ({}, {"enforce_eager": False}):
        with refused(f"{ROLLOUT}.enforce_eager", False, "vllm 0.24.0 allocates", works=works):
            check_graphs(graphs, facts, "cuda")
    for eager, config, device in (({"enforce_eager": True}, facts, "cuda"), ({}, facts, "cpu"), ({}, plain, "cuda")):
        check_graphs(eager, config, device)
    check_graphs({}, None, "cuda")
    installs("vllm", "0.27.1")
    check_graphs({}, facts, "cuda")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"engine_kwargs": None}, f"{VLLM}.worker_extension_cls=None"),
        ({"vllm": {"quantization": "fp8"}}, f"{VLLM}.quantization=fp8"),
        ({"qat": {"enable": True}}, f"{ROLLOUT}.qat.enable=True"),
    ],
)
def test_slices_that_the_rollout_can_not_take_are_refused_by_name_alone(model, settings, named):
    placed = rollout(2, **{"data_parallel_size": 2, "expert_parallel_size": 4, **settings})
    with refused(SYNC, "sliced", f"can't be with {named}: ", f"What works: {SYNC}=auto, or "):
        check(model, placed, 8, rollout_sync="sliced")
    for other in ("auto", "full"):
        check(model, placed, 8, rollout_sync=other)


def test_rollout_sync_that_the_rollout_takes_passes(model):
    for wanted in ("full", "auto", "sliced"):
        for placed in (rollout(2, data_parallel_size=2, expert_parallel_size=4), rollout()):
            check(model, placed, 8, rollout_sync=wanted)


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
    check(model, {**placed, "backend": "naive"}, 8, rollout_sync="full")
    with pytest.raises(SettingError, match=why) as caught:
        check(model, placed, 8, rollout_sync=wanted)
    assert str(caught.value).startswith(f"{ROLLOUT}.quantization={quantization}: ")
    assert caught.value.works == f"{BACKEND}=naive, or {ROLLOUT}.quantization=null"


def test_compressed_rollout_that_would_get_full_tensors_is_refused(model):
    """Overrides of the rollout's config are a mapping, or JSON."""
    by_tensor = copy.deepcopy(COMPRESSED["int8"])
    by_tensor["config_groups"]["group_0"]["weights"] |= {"strategy": "tensor"}
    for wanted, asked, why in (
        ("auto", by_tensor, "quantise fused weights with one scale for each tensor anew"),
        ("full", COMPRESSED["int8"], "its values and scales are sent in slices alone"),
    ):
        for given in ({"quantization_config": asked}, json.dumps({"quantization_config": asked})):
            with pytest.raises(SettingError, match="full tensors have no scales: .*" + why):
                check(model, rollout(vllm={"hf_overrides": given}), 8, rollout_sync=wanted)
    check(model, rollout(vllm={"hf_overrides": {"quantization_config": COMPRESSED["int8"]}}), 8)


def test_quantised_rollout_with_slices_that_cut_blocks_is_refused(tmp_path, model):
    with pytest.raises(SettingError, match=r"tensor_model_parallel_size=2: .* blocks of 128 x 128 share a scale"):
        check(model, rollout(quantization="fp8"), 8)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64, "num_experts": 8}
    fits = checkpoint(tmp_path / "fits", "olmoe", **sizes, num_attention_heads=4, num_key_value_heads=4)
    for backend in ("naive", "epfsdp2_p2p"):
        check(fits, rollout(2, quantization="fp8", backend=backend), 8, rollout_sync="sliced")


@pytest.mark.parametrize("key", ["ignored_layers", "ignore"])
def test_layers_that_are_not_to_be_quantised_have_to_be_there(model, key):
    layer = "model.layers.1"
    named = [f"{layer}.mlp.gate", f"{layer}.self_attn.qkv_proj", f"{layer}.self_attn.q_proj", "lm_head", "re:.*gate"]

    def placed(*more):
        config = {"quant_method": "fp8", key: [*named, *more]}
        return rollout(vllm={"hf_overrides": {"quantization_config": config}})

    check(model, placed())
    for name, near in ((f"{layer}.mlp.gatee", f"{layer}.mlp.gate"), ("model.layers.2.mlp.gate", "layers")):
        with pytest.raises(SettingError, match="has no such layer") as caught:
            check(model, placed(name))
        assert caught.value.setting == f"{VLLM}.hf_overrides.quantization_config.{key}" and near in caught.value.works
    with pytest.raises(SettingError, match="hf_overrides.quantization_config=.* needs full tensors"):
        check(model, placed(), rollout_sync="sliced")


def test_rollout_sync_sliced_of_an_unknown_family_is_refused_and_of_an_unknown_vllm_is_not(tmp_path, model, installs):
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4}
    other = checkpoint(tmp_path / "other", "mistral4", **sizes, **heads)
    with pytest.raises(SettingError, match="can't be with actor_rollout_ref.model=mistral4: how vLLM cuts it"):
        check(other, rollout(1), rollout_sync="sliced")
    check(other, rollout(1))
    cut = refused(TENSOR_PARALLEL, 2, "has no attention") if versions.vllm_in("<0.28") else contextlib.nullcontext()
    with cut:
        check(other, rollout(2))

    # For a model that is not here yet, settings of the rollout are checked.
    later = {"path": "some-org/not-here", **SDPA}
    check(later, rollout(), rollout_sync="sliced")
    with pytest.raises(SettingError, match="quantization=torchao"):
        check(later, rollout(quantization="torchao"), rollout_sync="sliced")

    installs("vllm", "0.99.0")  # whose layout the first sync compares
    check(model, rollout(), rollout_sync="sliced")
    check(model, rollout())


@pytest.mark.parametrize(
    ("settings", "setting", "value", "words"),
    [
        ({"vllm": {"enable_eplb": True}}, f"{VLLM}.enable_eplb", True, "silently wrong"),
        ({"vllm": {"tensor_parallel_size": 4}}, f"{VLLM}.tensor_parallel_size", 4, "feeds the wrong ones"),
        ({"vllm": {"pipeline_parallel_size": 2}}, f"{VLLM}.pipeline_parallel_size", 2, "feeds the wrong ones"),
        ({"vllm": {"data_parallel_size": 2}}, f"{VLLM}.data_parallel_size", 2, "feeds the wrong ones"),
        ({"expert_parallel_size": 3}, f"{ROLLOUT}.expert_parallel_size", 3, "all 2 workers"),
        ({"data_parallel_size": 0}, f"{ROLLOUT}.data_parallel_size", 0, "at least 1"),
        ({"tp": 3}, TENSOR_PARALLEL, 3, "the 8 trainer ranks are not a multiple"),
        ({"tp": 2, "data_parallel_size": 8}, TENSOR_PARALLEL, 2, "takes 16 workers"),
        ({"tp": 4}, TENSOR_PARALLEL, 4, "vLLM can't cut 2 attention heads so. What works: "),
    ],
)
def test_rollout_that_no_sync_reaches_is_refused(model, settings, setting, value, words):
    for wanted in ("auto", "full", "sliced"):
        with refused(setting, value, words, *(["one of [1, 2]"] if settings == {"tp": 4} else [])):
            check(model, rollout(**settings), 8, rollout_sync=wanted)


@pytest.mark.parametrize(
    ("sizes", "tp", "words"),
    [
        ({"num_attention_heads": 6, "moe_intermediate_size": 48}, 3, "a vocabulary of 64, padded to 64 "),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "4 key-value heads"),
        ({"num_attention_heads": 8, "moe_intermediate_size": 4}, 8, "intermediate size 4 of an expert"),
        ({"num_attention_heads": 16, "num_experts": 8}, 16, "8 experts"),
    ],
)
def test_tensor_parallel_size_that_vllm_can_not_shard_by_is_refused(model, sizes, tp, words):
    model["override_config"] |= sizes
    with refused(TENSOR_PARALLEL, tp, words):
        check(model, rollout(tp), 48)
    # With as many ranks as heads and fewer key-value heads, neighbours hold the same one.
    check(model, rollout(2), 48)


def test_tensor_parallel_size_with_data_parallel_workers_counts_them_for_experts(model):
    model["override_config"] |= {"moe_intermediate_size": 6}
    works = f"What works: {ROLLOUT}.expert_parallel_size=4"
    with refused(TENSOR_PARALLEL, 1, "the intermediate size 6 of an expert, in 4 parts", works=works):
        check(model, rollout(1, data_parallel_size=4), 8)
    check(model, rollout(1, data_parallel_size=4, expert_parallel_size=4), 8)


def test_transfer_plan_of_a_dense_part_that_does_not_divide_refuses_it(model):
    model["override_config"] |= {"intermediate_size": 33, "mlp_only_layers": [0]}
    with pytest.raises(SettingError, match=r"gate_proj.weight has 33 along dim 0, which tensor parallelism 2"):
        check(model, rollout())
    check(model, rollout(1))
