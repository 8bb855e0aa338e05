"""Settings of verl's trainers that generate in separate processes."""

__all__ = [
    "CHANGES",
    "FULLY_ASYNC",
    "LENT",
    "ONE_STEP_OFF",
    "ONE_AT_A_TIME",
    "SEPARATE",
    "STANDALONE",
    "ZERO_IN_THE_THIRD",
]

# A model that knows nothing earns no reward to learn from; this changes its weights all the same.
CHANGES = ["actor_rollout_ref.actor.entropy_coeff=1.0"]
# Learning rates of four updates: all, half, none, half.
ZERO_IN_THE_THIRD = [
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.num_cycles=1.0",
]
# One worker generates, in a process of its own.
_APART = [
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=epfsdp2_p2p",
    "ray_kwargs.ray_init.num_gpus=3",
]
# verl's experimental trainers; they have old log-probs from the trainer, to compare with the rollout's.
SEPARATE = [
    *_APART,
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1",
    "algorithm.rollout_correction.bypass_mode=False",
    "ray_kwargs.ray_init.num_cpus=64",
]
# verl's v1 trainer ``separate_async``.
STANDALONE = [
    *_APART,
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
]
# The same, whose trainer ranks have replicas of the rollout too; the quickstart's buffer can't wait for these.
LENT = [
    *(setting for setting in STANDALONE if "hybrid_engine" not in setting),
    "trainer.v1.separate_async.hybrid_rollout.enable_switch=True",
    "trainer.v1.sampler.custom_sampler.path=null",
]
ONE_STEP_OFF = ("other_trainer", "verl.experimental.one_step_off_policy.main_ppo")
FULLY_ASYNC = ("other_trainer", "verl.experimental.fully_async_policy.fully_async_main")
# Without staleness it generates for one update at a time.
ONE_AT_A_TIME = [
    "rollout.total_rollout_steps=32",  # four updates; verl logs each with the next
    "rollout.n=8",
    "async_training.trigger_parameter_sync_step=1",
    "async_training.staleness_threshold=0",
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
]
