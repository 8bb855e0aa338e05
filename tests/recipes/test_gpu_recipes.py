"""The GPU recipes compose on verl's real config, and their arithmetic holds for the real models' sizes."""

import functools
import os
import shlex
import subprocess
import sys

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from verl.utils.config import omega_conf_to_dataclass, validate_config

from epfsdp2.engine.compat import versions
from epfsdp2.engine.config import roles as engine_config_module
from epfsdp2.engine.preflight.model import inspect_model, largest_sent
from epfsdp2.engine.preflight.rollout import check_rollout, tensors_before_sharding
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.recipes.gpu.run import ALGORITHMS, CLUSTERS, command, overrides
from epfsdp2.rollout.layout.specs import Heads
from epfsdp2.rollout.servers import server_of, target_slices

# Sizes from config.json of the model's repository on the Hugging Face hub, and the parameters (1e9) of its model card.
# With a wrong size the count would differ.
MODELS = {
    # https://huggingface.co/Qwen/Qwen3-30B-A3B: 30.5B
    "Qwen/Qwen3-30B-A3B": (
        "qwen3_moe",
        30.5,
        {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
        },
    ),
    # https://huggingface.co/Qwen/Qwen3-235B-A22B: 235B
    "Qwen/Qwen3-235B-A22B": (
        "qwen3_moe",
        235,
        {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 94,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
        },
    ),
    # https://huggingface.co/openai/gpt-oss-120b: 116.8B (model card, arXiv 2508.10925, table 1)
    "unsloth/gpt-oss-120b-BF16": (
        "gpt_oss",
        116.8,
        {
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 36,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 201088,
        },
    ),
    # https://huggingface.co/zai-org/GLM-4.5-Air: 106B, without its multi-token prediction layer
    "zai-org/GLM-4.5-Air": (
        "glm4_moe",
        106,
        {
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 46,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "use_qk_norm": False,
            "vocab_size": 151552,
        },
    ),
}
# GPUs per recipe, from its issue.
GPUS = {
    "qwen3_30b_a3b_8gpu": 8,
    "qwen3_30b_a3b_16gpu": 16,
    "qwen3_235b_a22b_64gpu": 64,
    "gpt_oss_120b_32gpu": 32,
    "glm_4_5_air_32gpu": 32,
}
CARD_GB = 80
RECIPES = [(cluster, algorithm) for cluster in CLUSTERS for algorithm in ALGORITHMS]
recipes = pytest.mark.parametrize("cluster, algorithm", RECIPES, ids=[f"{c}-{a}" for c, a in RECIPES])


@functools.cache
def composed(cluster, algorithm, *more):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*overrides(cluster, algorithm), *more])


def model_of(config):
    return MODELS[config.actor_rollout_ref.model.path]


@functools.cache
def parameters(path):
    kind, _, sizes = MODELS[path]
    with torch.device("meta"):
        return sum(
            p.numel() for p in AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).parameters()
        )


@pytest.fixture
def local_model(tmp_path):
    """Return a function that makes a folder with a model's real config, without weights."""

    def make(config):
        kind, _, sizes = model_of(config)
        hf = AutoConfig.for_model(kind, **sizes)
        with torch.device("meta"):
            hf.architectures = [type(AutoModelForCausalLM.from_config(hf)).__name__]
        hf.save_pretrained(tmp_path)
        save_file({"x": torch.zeros(1)}, str(tmp_path / "model.safetensors"))
        return str(tmp_path)

    return make


@pytest.mark.parametrize("path", MODELS)
def test_gpu_recipe_table_of_sizes_equals_the_model(path):
    assert parameters(path) / 1e9 == pytest.approx(MODELS[path][1], rel=0.01)


def test_gpu_recipes_hold_every_model_and_algorithm():
    assert set(GPUS) == set(CLUSTERS)


@recipes
def test_command_of_recipe_is_verls_with_our_engine(cluster, algorithm):
    words = command(cluster, algorithm, ["trainer.nnodes=1"])
    assert words[:4] == ["-m", "verl.trainer.main_ppo", "engine=epfsdp2", "engine.ep_size=8"]
    assert words[-1] == "trainer.nnodes=1"
    # No key appears twice, so the order of the files does not matter.
    keys = [word.partition("=")[0].lstrip("+") for word in overrides(cluster, algorithm)]
    assert len(keys) == len(set(keys))


def test_gpu_recipe_with_print_shows_the_command_that_would_run():
    done = subprocess.run(
        [sys.executable, "-m", "epfsdp2.recipes.gpu.run", "--print", "gpt_oss_120b_32gpu", "ppo", "trainer.nnodes=1"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert shlex.split(done.stdout) == ["python", *command("gpt_oss_120b_32gpu", "ppo", ["trainer.nnodes=1"])]


@recipes
def test_recipe_topology_fits_the_cluster(cluster, algorithm):
    config = composed(cluster, algorithm)
    _, _, sizes = model_of(config)
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert world == GPUS[cluster]
    plan = Topology.arrange(world, config.engine.ep_size, config.engine.fsdp_size)
    assert plan.ep * plan.ep_fsdp * plan.dp_replicate == world
    experts = sizes.get("num_experts") or sizes.get("num_local_experts") or sizes["n_routed_experts"]
    assert experts % plan.ep == 0
    # Tokens are exchanged within a node.
    assert config.trainer.n_gpus_per_node % plan.ep == 0
    # The default cut of an expert weight, along dim 1, is even.
    width = sizes.get("moe_intermediate_size", sizes["intermediate_size"])
    assert sizes["hidden_size"] % plan.ep_fsdp == 0 and 2 * width % plan.ep_fsdp == 0

    tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    assert world % tp == 0 and heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    assert width % tp == 0


@recipes
def test_recipe_batches_divide_among_ranks(cluster, algorithm):
    config = composed(cluster, algorithm)
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    # verl repeats prompts n times, and splits a (mini-)batch evenly over the ranks.
    assert config.data.train_batch_size * rollout.n % world == 0
    assert actor.ppo_mini_batch_size * rollout.n % world == 0
    assert config.data.train_batch_size % actor.ppo_mini_batch_size == 0
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert actor.use_dynamic_bsz and rollout.log_prob_use_dynamic_bsz
    for tokens in (
        actor.ppo_max_token_len_per_gpu,
        rollout.log_prob_max_token_len_per_gpu,
        config.critic.ppo_max_token_len_per_gpu,
        config.critic.ppo_infer_max_token_len_per_gpu,
    ):
        assert tokens >= longest
    if algorithm == "ppo":
        # The critic's forward has the memory of the update.
        assert config.critic.ppo_infer_max_token_len_per_gpu == config.critic.ppo_max_token_len_per_gpu == 8192


@recipes
def test_recipe_memory_fits_a_gpu(cluster, algorithm, local_model):
    config = composed(cluster, algorithm)
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    rollout = config.actor_rollout_ref.rollout
    count = parameters(config.actor_rollout_ref.model.path)
    # float32: parameter, gradient and Adam's two moments. The rest remains for activations and gathered layers.
    assert config.engine.model_dtype == "fp32" and 16 * count / world < 0.8 * CARD_GB * 1e9
    # bf16 weights, and at least as much again for the key-value cache.
    weights = 2 * count / rollout.tensor_model_parallel_size
    assert 2 * weights < rollout.gpu_memory_utilization * CARD_GB * 1e9 * 1.1
    # A sync: the trainer's float32 shard, vLLM's weights, the bucket, and the largest whole tensor of a full sync.
    facts = inspect_model({"path": local_model(config)})
    bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    assert 4 * count / world + weights + bucket + 2 * largest_sent(facts.model)[1] < 0.9 * CARD_GB * 1e9
    # The bucket holds a worker's largest slice, and is no larger than a round of an exchange.
    topology = Topology.arrange(world, config.engine.ep_size, config.engine.fsdp_size)
    placed = server_of(rollout).rollout_of(rollout)
    slices = [
        need.block.numel * tensor.itemsize
        for tensor in tensors_before_sharding(facts.model, topology, itemsize=2)
        if ".layers." not in tensor.name or ".layers.1." in tensor.name  # all are alike
        for worker in range(placed.workers)
        for need in target_slices(tensor, placed, worker, Heads.of(facts.model.config))
    ]
    assert max(slices) < bucket == config.engine.sync_megabytes << 20 >> 1


@recipes
def test_recipe_with_the_real_sizes_passes_verls_validation(cluster, algorithm, local_model, monkeypatch):
    monkeypatch.setattr(engine_config_module, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(engine_config_module, "is_support_ipc", lambda: True)
    version = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: "2.8.3" if name == "flash-attn" else version(name))
    folder = local_model(composed(cluster, algorithm))
    config = composed(
        cluster,
        algorithm,
        f"actor_rollout_ref.model.path={folder}",
        "+actor_rollout_ref.model.load_tokenizer=False",
        "+critic.model.load_tokenizer=False",
    )
    critic = algorithm == "ppo"
    validate_config(config, use_reference_policy=not critic, use_critic=critic)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert (actor.engine.ep_size, actor.engine.param_offload, actor.engine.optimizer_offload) == (8, True, True)
    assert actor.engine.mixed_precision == {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    if critic:
        assert config.critic.model.path == folder
        theirs, mine = config.critic.model.override_config, config.actor_rollout_ref.model.override_config
        assert OmegaConf.to_container(theirs) == OmegaConf.to_container(mine)


def test_recipe_with_a_smaller_bucket_is_refused_without_ipc(local_model, stacks_are_sent):
    config = composed("qwen3_30b_a3b_8gpu", "grpo")
    facts = inspect_model({"path": local_model(config)})
    with pytest.raises(ValueError, match="gate_up_proj"):
        check_rollout(config.engine, 8, {"update_weights_bucket_megabytes": 767}, facts)


def test_recipes_are_lists_of_plain_overrides():
    for cluster, algorithm in RECIPES:
        for override in overrides(cluster, algorithm):
            assert isinstance(override, str) and "=" in override
            assert "=" + os.path.expanduser("~") not in override
