"""The GPU recipes compose on verl's real config, and their arithmetic holds for the real models' sizes."""

import functools
import os
import shlex

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
from epfsdp2.engine.preflight.rollout import tensors_before_sharding
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.recipes.gpu import run
from epfsdp2.recipes.gpu.run import ALGORITHMS, CLUSTERS, command, overrides
from epfsdp2.recipes.plan.cards import config_of
from epfsdp2.rollout.layout.specs import Heads
from epfsdp2.rollout.servers import server_of, target_slices

# The parameters (1e9) of the models' cards on the hub: with a wrong size the count would differ.
MODELS = {
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-235B-A22B": 235,
    "unsloth/gpt-oss-120b-BF16": 116.8,  # arXiv 2508.10925, table 1
    "zai-org/GLM-4.5-Air": 106,  # without its multi-token prediction layer
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
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
RECIPES = [(cluster, algorithm) for cluster in CLUSTERS for algorithm in ALGORITHMS]
recipes = pytest.mark.parametrize("cluster, algorithm", RECIPES, ids=[f"{c}-{a}" for c, a in RECIPES])
IN_SHORT = [("qwen3_30b_a3b_8gpu", "grpo"), *((cluster, "ppo") for cluster in CLUSTERS)]


@functools.cache
def composed(cluster, algorithm, *more):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*overrides(cluster, algorithm), *more])


@functools.cache
def meta_model(path):
    """Return the real model on the meta device."""
    name = path.rpartition("/")[2].removesuffix("-BF16")
    air = name == "GLM-4.5-Air"
    config = AutoConfig.for_model("glm4_moe", attention_bias=True, head_dim=128) if air else config_of(name)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def parameters(path):
    return sum(param.numel() for param in meta_model(path).parameters())


@pytest.fixture
def local_model(tmp_path):
    """Return a function that makes a folder with a model's real config, without weights."""

    def make(config):
        model = meta_model(config.actor_rollout_ref.model.path)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(tmp_path)
        save_file({"x": torch.zeros(1)}, str(tmp_path / "model.safetensors"))
        return str(tmp_path)

    return make


@pytest.mark.parametrize("path", MODELS)
def test_gpu_recipes_model_has_the_published_number_of_parameters(path):
    assert parameters(path) / 1e9 == pytest.approx(MODELS[path], rel=0.01)


@recipes
def test_command_of_recipe_is_verls_with_our_engine(cluster, algorithm):
    assert set(GPUS) == set(CLUSTERS)
    words = command(cluster, algorithm, ["trainer.nnodes=1"])
    assert words[:4] == ["-m", "verl.trainer.main_ppo", "engine=epfsdp2", "engine.ep_size=8"]
    assert words[-1] == "trainer.nnodes=1"
    given = overrides(cluster, algorithm)
    assert all(isinstance(word, str) and "=" in word for word in given)
    assert not any("=" + os.path.expanduser("~") in word for word in given)
    # No key appears twice, so the order of the files does not matter.
    keys = [word.partition("=")[0].lstrip("+") for word in given]
    assert len(keys) == len(set(keys))


def test_gpu_recipe_with_print_shows_the_command_that_would_run(capsys):
    run.main(["--print", "gpt_oss_120b_32gpu", "ppo", "trainer.nnodes=1"])
    words = command("gpt_oss_120b_32gpu", "ppo", ["trainer.nnodes=1"])
    assert shlex.split(capsys.readouterr().out) == ["python", *words]


@recipes
def test_recipe_topology_and_batches_fit_the_cluster_and_the_model(cluster, algorithm):
    config = composed(cluster, algorithm)
    sizes = meta_model(config.actor_rollout_ref.model.path).config
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert world == GPUS[cluster]
    plan = Topology.arrange(world, config.engine.ep_size, config.engine.fsdp_size)
    experts = next(n for name in EXPERTS if (n := getattr(sizes, name, None)))
    assert experts % plan.ep == 0
    # Tokens are exchanged within a node.
    assert config.trainer.n_gpus_per_node % plan.ep == 0
    # The default cut of an expert weight, along dim 1, is even.
    width = getattr(sizes, "moe_intermediate_size", sizes.intermediate_size)
    assert sizes.hidden_size % plan.ep_fsdp == 0 and 2 * width % plan.ep_fsdp == 0

    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    tp, kv_heads = rollout.tensor_model_parallel_size, sizes.num_key_value_heads
    assert world % tp == 0 and sizes.num_attention_heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    assert width % tp == 0
    # verl repeats prompts n times, and splits a (mini-)batch evenly over the ranks.
    assert config.data.train_batch_size * rollout.n % world == 0
    assert actor.ppo_mini_batch_size * rollout.n % world == 0
    assert config.data.train_batch_size % actor.ppo_mini_batch_size == 0
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert actor.use_dynamic_bsz and rollout.log_prob_use_dynamic_bsz
    critic = (config.critic.ppo_max_token_len_per_gpu, config.critic.ppo_infer_max_token_len_per_gpu)
    assert min(actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu, *critic) >= longest
    # The critic's forward has the memory of the update.
    assert algorithm != "ppo" or critic == (8192, 8192)


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


@pytest.mark.parametrize(
    "cluster, algorithm",
    [pytest.param(*recipe, marks=[] if recipe in IN_SHORT else pytest.mark.long) for recipe in RECIPES],
)
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
