"""verl's algorithms and losses with ``engine=epfsdp2``: an update's gradients are those of the plain model.

Each is composed from a command line, and goes through verl's functions of the driver and its ``TrainingWorker``. The
expected gradients are those of verl's losses on the outputs of the plain model in one process.
"""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.support.models.tiny import reference_model, relative_error, save_qwen3_moe
from tests.support.ranks import each_case, run_ranks
from tests.support.trainer.ppo import RESPONSE, SAMPLES, ppo_batch, ppo_samples, ppo_worker, watched_gradients

WORLD, MICRO = 2, 2
PER_RANK = SAMPLES // WORLD
GROUP = 4
TEMPERATURE = 0.7
TOP = 4
_jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
RELATIVE = 1e-5

ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss"
CORRECTION = "algorithm.rollout_correction"
DISTILLATION = "distillation.distillation_loss"
COMMON = [
    "engine=epfsdp2",
    "engine.ep_size=2",
    "actor_rollout_ref.rollout.name=vllm",
    f"actor_rollout_ref.rollout.n={GROUP}",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu={MICRO}",
    f"{ACTOR}.ppo_mini_batch_size={SAMPLES // GROUP}",
    "algorithm.adv_estimator=grpo",
]
TEACHER = [
    "distillation.enabled=True",
    "distillation.nnodes=1",
    "distillation.n_gpus_per_node=2",
    "distillation.teacher_models.teacher_model.model_path=/none",
    f"{DISTILLATION}.topk={TOP}",
]
SUPERVISED = [f"{DISTILLATION}.loss_mode=forward_kl_topk", f"{DISTILLATION}.use_policy_gradient=False"]
ALGORITHMS = {
    "grpo": [],
    "dr.grpo": ["algorithm.norm_adv_by_std_in_grpo=False", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"],
    "ppo": ["algorithm.adv_estimator=gae", "algorithm.gamma=0.9", "algorithm.lam=0.8"],
    "kl in reward": ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.3"],
    "dapo": [f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.clip_ratio_c=10.0"],
    **{mode: [f"{ACTOR}.loss_agg_mode={mode}"] for mode in ("token-sum", "seq-mean-token-sum")},
    "gspo": [f"{LOSS}.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
    "sapo": [f"{LOSS}.loss_mode=sapo"],
    "cispo": [f"{LOSS}.loss_mode=cispo", f"{ACTOR}.clip_ratio_high=0.1"],
    "dppo_tv": [f"{LOSS}.loss_mode=dppo_tv", f"{ACTOR}.clip_ratio_c=20"],
    "dppo_kl": [f"{LOSS}.loss_mode=dppo_kl", f"{ACTOR}.clip_ratio_low=0.001", f"{ACTOR}.clip_ratio_high=0.001"],
    "dro": [f"{LOSS}.loss_mode=dro", f"{LOSS}.dro_beta=0.5"],
    "gpg": ["algorithm.adv_estimator=gpg", f"{LOSS}.loss_mode=gpg"],
    # These three look at one micro-batch at a time.
    "clip-cov": [f"{LOSS}.loss_mode=clip_cov", f"{LOSS}.clip_cov_ratio=1.0", f"{LOSS}.clip_cov_lb=0.05"],
    "kl-cov": [f"{LOSS}.loss_mode=kl_cov", f"{LOSS}.kl_cov_ratio=0.2", f"{LOSS}.ppo_kl_coef=1.0"],
    "gmpo": [f"{LOSS}.loss_mode=geo_mean"],
    **{
        name: [f"algorithm.adv_estimator={name}"]
        for name in (
            *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "rloo_vectorized"),
            *("opo", "grpo_vectorized", "grpo_passk", "remax"),
            *("optimal_token_baseline", "tir_optimal_token_baseline"),
        )
    },
    "gdpo": ["algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[accuracy]"],
    "tis": [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=1.2"],
    "sequence is": [f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_batch_normalize=True"],
    "rejection": [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.8_1.25"],
    "bypass": [f"{CORRECTION}.bypass_mode=True"],
    "bypass, reinforce": [
        f"{CORRECTION}.bypass_mode=True",
        f"{LOSS}.loss_mode=bypass_mode",
        f"+{LOSS}.rollout_correction.loss_type=reinforce",
        f"+{LOSS}.rollout_correction.rollout_is=sequence",
        f"+{LOSS}.rollout_correction.rollout_is_threshold=1.1",
    ],
    "entropy bonus": [f"{ACTOR}.entropy_coeff=0.1"],
    **{
        f"kl loss {kind}": [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.5", f"{ACTOR}.kl_loss_type={kind}"]
        for kind in ("low_var_kl", "k3", "k3+", "k2", "kl", "k1", "abs", "mse")
    },
    "distillation k1": [*TEACHER, f"{DISTILLATION}.loss_mode=k1", f"{DISTILLATION}.use_policy_gradient=True"],
    "distillation k3": [*TEACHER, f"{DISTILLATION}.loss_mode=k3", f"{DISTILLATION}.use_policy_gradient=False"],
    **{
        f"distillation {kind}": [
            *TEACHER,
            f"{DISTILLATION}.loss_mode={kind}",
            f"{DISTILLATION}.use_policy_gradient=True",
        ]
        for kind in ("kl", "k2", "mse", "abs", "low_var_kl")
    },
    "distillation top-k in chunks": [*TEACHER, *SUPERVISED, f"+{DISTILLATION}.use_chunked_topk=True"],
    "distillation top-k": [*TEACHER, *SUPERVISED, f"{DISTILLATION}.use_task_rewards=True"],
    "distillation top-k alone": [*TEACHER, *SUPERVISED, f"{DISTILLATION}.use_task_rewards=False"],
}
BY_MICRO_BATCH = {"clip-cov", "kl-cov", "gmpo"}


def _composed(overrides):
    import verl.trainer.config
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(os.path.dirname(verl.trainer.config.__file__), version_base=None):
        config = compose("ppo_trainer", [*COMMON, *overrides])
    OmegaConf.resolve(config)
    return config


class _Plain:
    """The plain model's outputs for every sample, and what comes with samples from elsewhere."""

    def __init__(self, folder):
        self.model = reference_model(folder)
        self.samples = ppo_samples()
        generator = torch.Generator().manual_seed(5)
        self.logits = [
            self.model(input_ids=ids[None], use_cache=False).logits[0] / TEMPERATURE for ids, *_ in self.samples
        ]
        self.log_probs, self.entropy, self.teacher = [], [], {1: [], TOP: []}
        for (ids, *_), logits in zip(self.samples, self.logits, strict=True):
            every = logits.log_softmax(-1)
            self.log_probs.append(every.gather(-1, ids.roll(-1)[:, None])[:, 0])
            self.entropy.append(-(every.exp() * every).sum(-1))
            teacher = (logits.detach() + torch.randn(logits.shape, generator=generator)).log_softmax(-1)
            self.teacher[1].append((teacher.gather(-1, ids.roll(-1)[:, None]), ids.roll(-1)[:, None]))
            self.teacher[TOP].append(tuple(teacher.topk(TOP)))

        def near(scale):
            """Log-probs of responses by a policy that is not far."""
            found = torch.zeros(SAMPLES, RESPONSE)
            for i, (ids, prompt, *_) in enumerate(self.samples):
                after = len(ids) - prompt
                noise = scale * torch.randn(after, generator=generator)
                found[i, :after] = self.log_probs[i].detach()[prompt - 1 : -1] + noise
            return found

        self.old, self.rollout, self.reference = near(0.3), near(0.4), near(0.5)
        self.values = torch.randn(SAMPLES, RESPONSE, generator=generator)
        self.scores = torch.randn(SAMPLES, generator=generator)


def _driven(config, plain):
    """Return the samples as verl's trainer prepares them for an update of the actor (``trainer_base.py``)."""
    import numpy as np
    from verl import DataProto
    from verl.trainer.ppo.core_algos import get_kl_controller
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    algorithm = config.algorithm
    mask = ppo_batch(plain.samples)["response_mask"]
    rewards = torch.zeros(SAMPLES, RESPONSE)
    rewards[torch.arange(SAMPLES), mask.sum(-1) - 1] = plain.scores
    bypass = algorithm.rollout_correction.bypass_mode
    data = DataProto.from_dict(
        {
            "response_mask": mask,
            "token_level_scores": rewards,
            "token_level_rewards": rewards,
            "old_log_probs": plain.rollout if bypass else plain.old,
            "rollout_log_probs": plain.rollout,
            "ref_log_prob": plain.reference,
            "values": plain.values * mask,
            # These are what single estimators read besides.
            **({"reward_baselines": plain.scores.roll(1)} if algorithm.adv_estimator == "remax" else {}),
            "sum_pi_squared": plain.old.exp().square(),
            "prompts": mask[:, :0],
            "attention_mask": mask,
        },
        non_tensors={
            "uid": np.array([str(i // GROUP) for i in range(SAMPLES)], dtype=object),
            "accuracy": plain.scores.numpy(),
        },
    )
    if algorithm.use_kl_in_reward:
        data, _ = apply_kl_penalty(data, get_kl_controller(algorithm.kl_ctrl), algorithm.kl_penalty)
    if not bypass:
        data, _ = compute_rollout_correction_and_add_to_batch(data, algorithm.rollout_correction)
    data = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=[f"{i // GROUP}_{i}_0" for i in range(SAMPLES)],
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=GROUP,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
    )
    names = ("response_mask", "old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights")
    return {name: data.batch[name] for name in names if name in data.batch}


def _batch(plain, driven, chosen, top, **facts):
    from verl.utils import tensordict_utils as tu

    batch = ppo_batch(plain.samples[chosen])
    for name, tensor in driven.items():
        batch[name] = tensor[chosen]
    if top:
        log_probs, ids = zip(*plain.teacher[top][chosen], strict=True)
        batch["teacher_logprobs"], batch["teacher_ids"] = _jagged(log_probs), _jagged(ids)
    tu.assign_non_tensor(batch, temperature=TEMPERATURE, global_batch_size=SAMPLES, **facts)
    return batch


def _expected(plain, loss, batch_of, with_entropy, distillation, by_micro_batch):
    """Loss and gradients of the plain model, of all samples at once or of each micro-batch of each rank."""
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
    from verl.utils import tensordict_utils as tu

    size, ranks = (MICRO, WORLD) if by_micro_batch else (SAMPLES, 1)
    tokens = ppo_batch(plain.samples)["loss_mask"].sum().item()
    total = 0.0
    for start in range(0, SAMPLES, size):
        chosen = slice(start, start + size)
        data = batch_of(chosen)
        tu.assign_non_tensor(data, dp_size=ranks, batch_num_tokens=tokens)
        output = {"log_probs": _jagged(plain.log_probs[chosen])}
        if with_entropy:
            output["entropy"] = _jagged(plain.entropy[chosen])
        if distillation is not None and distillation.distillation_loss.loss_settings.use_topk:
            logits = torch.cat(plain.logits[chosen])[None]
            ids, log_probs = data["teacher_ids"], data["teacher_logprobs"]
            for name, own in compute_forward_kl_topk(logits, log_probs, ids, distillation, "thd").items():
                output[name] = torch.nested.nested_tensor_from_jagged(own[0], data["input_ids"].offsets())
        total = total + loss(model_output=output, data=data)[0] / ranks
    named = dict(plain.model.named_parameters())
    return total.item(), dict(zip(named, torch.autograd.grad(total, named.values(), retain_graph=True), strict=True))


def _update_by_every_algorithm(folder, configs):
    from verl.trainer.distillation import distillation_ppo_loss
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    plain = _Plain(folder)
    worker = ppo_worker(folder, 2, micro_batch=MICRO)
    seen = watched_gradients(worker, steps=False)
    mine = slice(dist.get_rank() * PER_RANK, (dist.get_rank() + 1) * PER_RANK)

    def check(name, config):
        # As verl's worker and its trainer make them of the config (``engine_workers.py``, ``trainer_base.py``).
        actor, distillation, top = omega_conf_to_dataclass(config.actor_rollout_ref.actor), None, 0
        loss = partial(ppo_loss, config=actor)
        facts = {"distillation_use_topk": False, "distillation_only": False}
        if config.distillation.enabled:
            distillation = omega_conf_to_dataclass(config.distillation)
            settings = distillation.distillation_loss
            loss = partial(distillation_ppo_loss, config=actor, distillation_config=distillation)
            use_topk = settings.loss_settings.use_topk
            only = use_topk and not settings.use_task_rewards and not settings.use_policy_gradient
            facts, top = {"distillation_use_topk": use_topk, "distillation_only": only}, TOP if use_topk else 1
        with_entropy = actor.calculate_entropy or actor.entropy_coeff != 0.0
        batch_of = partial(_batch, plain, _driven(config, plain), top=top, calculate_entropy=with_entropy, **facts)
        by_micro_batch = name in BY_MICRO_BATCH
        wanted_loss, wanted = _expected(plain, loss, batch_of, with_entropy, distillation, by_micro_batch)

        worker.set_loss_fn(loss)
        batch = batch_of(mine)
        tu.assign_non_tensor(batch, mini_batch_size=SAMPLES, epochs=actor.ppo_epochs)
        metrics = tu.get(worker.train_mini_batch(batch), "metrics")
        errors = {name: relative_error(seen[name], want) for name, want in wanted.items()}
        assert {name: error for name, error in errors.items() if not error < RELATIVE} == {}
        assert abs(metrics["loss"][0] - wanted_loss) < 1e-5 * abs(wanted_loss) + 1e-6, (metrics, wanted_loss)

    each_case(configs.items(), check)


# Each has another path through the engine; the others change the numbers of a batch, or the formula of a loss.
PATHS = {
    *("grpo", "clip-cov", "sequence is", "bypass, reinforce", "kl loss low_var_kl"),
    *("distillation k3", "distillation top-k", "distillation top-k alone"),
}


@pytest.mark.parametrize(
    "names", [PATHS, pytest.param(ALGORITHMS.keys() - PATHS, marks=pytest.mark.long)], ids=["paths", "variants"]
)
def test_update_with_every_algorithm_equals_the_plain_model(tmp_path, names):
    configs = {name: _composed(overrides) for name, overrides in ALGORITHMS.items() if name in names}
    run_ranks(_update_by_every_algorithm, WORLD, save_qwen3_moe(tmp_path), configs, timeout=400)


@pytest.mark.parametrize("registry", ["policy_loss", "adv_estimator", "distillation_loss"])
def test_update_cases_name_every_entry_of_verls_registries(registry):
    from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    said = [setting.partition("=") for settings in (COMMON, *ALGORITHMS.values()) for setting in settings]
    setting, others, known = {
        "policy_loss": (f"{LOSS}.loss_mode", {"vanilla"}, POLICY_LOSS_REGISTRY),  # verl's default
        "adv_estimator": ("algorithm.adv_estimator", set(), ADV_ESTIMATOR_REGISTRY),
        "distillation_loss": (f"{DISTILLATION}.loss_mode", set(), DISTILLATION_LOSS_REGISTRY),
    }[registry]
    assert {value for name, _, value in said if name == setting} | others == set(known)
