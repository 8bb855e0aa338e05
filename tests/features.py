"""What of verl works with ``engine=epfsdp2``, and which test shows it; docs/compatibility.md is generated from this.

A new feature gets a line here with the test that would fail without it (docs/generate.py writes the page).
"""

from dataclasses import dataclass

__all__ = ["FEATURES", "Feature"]


@dataclass(frozen=True)
class Feature:
    """
    Args:
        name: as users of verl call it; Markdown.
        works: what of it works.
        refused: what of it is refused on the driver; empty where nothing is.
        tests: that show it, as ``folder/test_file.py::test_function`` below ``tests``.
    """

    name: str
    works: str
    refused: str
    tests: tuple[str, ...]


FEATURES = (
    Feature(
        "trainers",
        "v1 `sync`, `colocate_async`, `separate_async`; one-step-off, fully-async; `sft_trainer`; rollouts by vLLM, "
        "SGLang and [others](weight_sync.md#rollouts-other-than-vllm)",
        "EPLB",
        (
            "e2e/test_quickstart.py::test_quickstart_raises_the_reward_with_the_trainers_weights_in_vllm",
            "e2e/test_trainers.py::test_sft_trainer_lowers_the_loss",
            "e2e/test_trainers.py::test_colocate_async_trainer_trains",
            "e2e/test_standalone.py::test_standalone_rollout_follows_the_trainer",
            "e2e/test_trainers.py::test_one_step_off_trainer_trains",
            "e2e/test_trainers.py::test_fully_async_trainer_trains",
            "engine/preflight/test_preflight.py::test_any_rollout_is_sent_full_tensors_and_only_vllm_slices",
            "e2e/test_sglang.py::test_sglang_run_raises_the_reward_and_agrees_with_the_trainer",
        ),
    ),
    Feature(
        "losses and algorithms",
        "every policy loss of verl 0.9.1 (PPO, DAPO's clipping, GSPO, SAPO, CISPO, DPPO, GMPO, GPG, DRO, Clip-Cov, "
        "KL-Cov, bypass mode) and way to aggregate; DAPO's filtered groups and penalty on long answers; GAE, GRPO, "
        "Dr.GRPO, REINFORCE++, RLOO, OPO; rollout correction; entropy bonus, five KL losses; distillation by "
        "estimators and top-k",
        "top-k distillation with fused kernels or `pad_to_length`",
        (
            "engine/integration/test_algorithms.py::test_an_update_by_every_algorithm_equals_the_plain_model",
            "engine/integration/test_algorithms.py::test_no_policy_loss_of_verl_is_left_out",
            "e2e/test_dapo.py::test_dapo_run_filters_groups_and_punishes_long_answers",
            "engine/preflight/test_preflight.py::test_top_k_distillation_needs_logits_of_the_batch_s_tokens",
        ),
    ),
    Feature(
        "[agents](engine.md#agents)",
        "verl's agent loop with several turns and tools; responses cut off within a turn; partial rollouts of "
        "fully-async, whose tokens keep the log-probs of the weights that wrote them; with packed rows, dynamic "
        "batches and R3",
        "",
        (
            "engine/integration/test_multi_turn.py::test_an_update_of_turns_with_a_tool_equals_the_plain_model",
            "e2e/test_agents.py::test_agent_that_calls_a_tool_raises_its_reward",
            "e2e/test_agents.py::test_what_the_tool_answered_has_routes_and_no_part_in_the_loss",
            "e2e/test_partial_rollouts.py::"
            "test_partial_rollout_keeps_the_log_prob_of_the_weights_that_wrote_each_token",
        ),
    ),
    Feature(
        "critic",
        "one-output head from a causal LM or a checkpoint with a head; GAE, warm-up, its own optimizer and checkpoints",
        "",
        (
            "engine/integration/test_value_update.py::test_gradients_equal_the_plain_model",
            "engine/integration/test_value_update.py::test_a_critic_with_adapters_trains_them_and_its_head",
            "engine/integration/test_value_update.py::test_a_trained_head_is_read_also_where_transformers_has_no_class_for_it",
            "e2e/test_ppo.py::test_ppo_run_with_critic_and_reference_raises_the_reward",
        ),
    ),
    Feature(
        "reference policy, KL in loss and in reward",
        "forward only, offloaded",
        "",
        (
            "engine/integration/test_ppo_update.py::test_reference_policy_is_forward_only",
            "e2e/test_ppo.py::test_ppo_run_with_critic_and_reference_raises_the_reward",
        ),
    ),
    Feature(
        "batches",
        "[packed](engine.md#packed-rows), in every family, and padded; dynamic sizes, temperature, entropy chunked and "
        "recomputed, `pad_to_length`",
        "GLM-4.5V and ERNIE-4.5-VL packed with flash attention",
        (
            "engine/integration/test_ppo_update.py::test_gradients_and_norm_equal_the_plain_model",
            "engine/packing/test_packing.py::test_packed_sequences_are_computed_as_if_apart",
            "engine/packing/test_packing.py::test_ppo_updates_of_packed_rows_equal_the_plain_model",
        ),
    ),
    Feature(
        "log-probs without whole logits",
        "[`engine.chunked_logits`](engine.md#log-probs-and-entropy), by default; whole logits where they are scaled, "
        "capped or read",
        "",
        (
            "engine/head/test_head.py::test_every_family_is_exact_or_keeps_whole_logits",
            "engine/head/test_head.py::test_logits_are_whole_where_verl_reads_them",
        ),
    ),
    Feature(
        "fused linear cross-entropy",
        "`use_fused_kernels`",
        "heads with a bias or scaled logits",
        (
            "engine/integration/test_fused_kernels.py::test_every_family_is_exact_or_refused",
            "engine/integration/test_fused_kernels.py::test_an_update_equals_the_plain_model",
        ),
    ),
    Feature(
        "routers",
        "[load-balancing loss and z-loss](engine.md#load-of-the-experts) over all ranks' tokens, load and "
        "dropped-token metrics",
        "ERNIE-4.5-VL",
        (
            "engine/moe/router/test_router_losses.py::test_router_losses_of_every_family_equal_their_formula",
            "engine/moe/router/test_router_losses.py::test_router_losses_are_over_the_tokens_of_all_ranks",
            "engine/moe/router/test_router_losses.py::test_router_losses_reach_adapters",
            "engine/moe/router/test_router_losses.py::test_router_losses_of_unsuitable_models_are_refused",
        ),
    ),
    Feature(
        "memory",
        "`param_offload`, `optimizer_offload`, FSDP2's `offload_policy`, `enable_activation_offload` with full "
        "checkpointing",
        "",
        (
            "engine/planner/test_held_memory.py::test_what_was_gathered_is_given_back",
            "engine/fsdp/test_activation_checkpoint.py::test_offloaded_inputs_leave_the_device_and_change_nothing",
        ),
    ),
    Feature(
        "[sequence parallelism](engine.md#sequence-parallelism)",
        "Ulysses for any family on transformers' attention interface: full, sliding, MLA, sinks; linear attention and "
        "state spaces; images; with every `ep`, HSDP, the critic, replay",
        "padded batches; an indexer that chooses keys (GLM-MoE-DSA, DeepSeek-V4); Llama 4",
        (
            "engine/fsdp/test_ulysses.py::test_every_family_equals_the_plain_model",
            "engine/packing/test_shared_mixers.py::test_a_family_that_carries_a_state_equals_the_plain_model",
            "engine/model/test_vision.py::test_updates_of_shared_rows_equal_the_plain_model",
            "engine/fsdp/test_ulysses.py::test_what_mixes_tokens_otherwise_is_refused",
            "e2e/test_sequence_parallel.py::test_sequence_parallel_run_trains",
        ),
    ),
    Feature(
        "[router replay](engine.md#router-replay)",
        "R2 and R3, with every checkpointing",
        "padded batches; R2 with bypass mode; ERNIE-4.5-VL (two experts modules in a layer), Llama 4 (one expert "
        "for each token)",
        (
            "engine/moe/router/test_router_replay.py::test_replay_of_every_family_takes_the_recorded_routes",
            "engine/moe/router/test_router_replay.py::test_replay_of_unusable_routes_raises",
            "e2e/test_router_replay.py::test_router_replay_of_rollout_routes_brings_log_probs_together",
        ),
    ),
    Feature(
        "[LoRA](engine.md#lora)",
        "linears and experts; to vLLM merged (`lora.merge=True`), or apart from the weights (colocated, "
        "`epfsdp2_p2p`), where those of experts need a GPU; rsLoRA, DoRA of linears, `modules_to_save` and patterns as "
        "peft's; a peft adapter in each checkpoint, without the frozen weights; the base as reference",
        "dropout; DoRA of experts; apart from the weights DoRA, `modules_to_save` and patterns of ranks",
        (
            "engine/lora/test_peft.py::test_adapters_equal_those_of_peft",
            "engine/lora/test_peft.py::test_adapters_that_peft_has_saved_are_read_as_they_are",
            "engine/lora/test_lora.py::test_lora_resumes_on_another_mesh_and_exports_merged_weights",
            "engine/optim/test_muon.py::test_muon_on_adapters_steps_like_torch_muon_on_their_matrices",
            "engine/lora/test_lora.py::test_lora_log_probs_gradients_and_two_updates_equal_the_plain_model",
            "engine/lora/test_lora.py::test_lora_adapter_that_was_saved_is_loaded_by_peft",
            "engine/lora/test_lora.py::test_lora_check_refuses_bad_settings",
            "rollout/remote/test_checkpoint_engine.py::test_checkpoint_engine_sends_the_base_once_and_adapters_in_every_sync",
            "rollout/test_adapters.py::test_adapters_alone_equal_those_that_vllm_loads_from_a_file",
            "e2e/test_lora.py::test_lora_run_trains_adapters_that_reach_the_rollout",
        ),
    ),
    Feature(
        "[images](engine.md#images)",
        "Qwen3-VL-MoE and GLM-4.5V, also where some ranks have none; vLLM sees what it would with the exported model; "
        "`freeze_vision_tower`",
        "ERNIE-4.5-VL, Qwen3-Omni, Gemma 4; audio",
        (
            "engine/model/test_vision.py::test_two_updates_equal_the_plain_model",
            "engine/model/test_vision.py::test_two_updates_beside_a_frozen_tower_equal_the_plain_model",
            "engine/model/test_vision.py::test_glm4v_moe",
            "rollout/vllm/test_vllm_images.py::test_vllm_sees_an_image_as_a_fresh_engine_on_the_export_does",
            "e2e/test_images.py::test_grpo_run_on_images_trains",
        ),
    ),
    Feature(
        "[optimizers](engine.md#optimizers-and-schedules)",
        "any of `torch.optim` by `optim.optimizer`; `Muon`, which orthogonalises each expert's matrices by themselves",
        "",
        (
            "engine/optim/test_optimizer.py::test_optimizer_from_config_chooses_the_algorithms",
            "engine/optim/test_muon.py::test_muon_two_steps_of_training_equal_the_reference",
        ),
    ),
    Feature(
        "[checkpoints](checkpoints.md)",
        "resumed on any other mesh; saved in the background; Hugging Face models out (`hf_model`, `recipes.export`); "
        "verl's fsdp2 checkpoints in (`recipes.import_fsdp2`), and FP8, INT4, MXFP4 and NVFP4 ones "
        "(`recipes.dequantise`)",
        "",
        (
            "engine/checkpoint/test_resume_matrix.py::test_a_run_saved_on_any_mesh_goes_on_on_any_other",
            "e2e/test_resume.py::test_run_resumed_from_a_background_save_goes_on",
            "recipes/test_export.py::test_export_of_a_trained_model_has_its_weights_bit_for_bit",
            "recipes/test_import_fsdp2.py::test_import_of_a_run_of_verls_goes_on_here",
            "recipes/test_dequantise.py::test_a_model_is_what_transformers_makes_of_the_quantised_one",
        ),
    ),
    Feature(
        "[weight sync](weight_sync.md)",
        "colocated, and to rollouts apart from the trainer (`checkpoint_engine.backend=epfsdp2_p2p`, or verl's own)",
        "",
        (
            "e2e/test_quickstart.py::test_sync_of_every_step_leaves_the_trainers_weights_in_every_worker",
            "rollout/vllm/test_vllm_families.py::test_three_syncs_of_slices",
            "rollout/test_other_backends.py::"
            "test_backends_that_iterate_get_full_tensors_and_delta_gets_what_has_changed",
            "e2e/test_standalone.py::test_standalone_rollout_follows_the_trainer",
        ),
    ),
    Feature(
        "[rollouts in FP8](weight_sync.md#rollouts-in-fp8)",
        "`rollout.quantization=fp8`: slices of nine families are quantised where they are, with the bits of vLLM's own "
        "quantisation, and the trainer may compute with them (`engine.rollout_quantization_aware`); full tensors for "
        "other families",
        "workers apart from the trainer; tensor-parallel sizes that cut a block of 128 x 128",
        (
            "rollout/quantise/test_quantise.py::test_slices_have_the_bits_that_vllm_makes_of_the_whole_weights",
            "rollout/layout/test_fp8_families.py::test_values_and_scales_of_every_family_are_where_vllms_loaders_put_them",
            "rollout/vllm/test_vllm_fp8.py::test_workers_hold_what_vllm_loads_of_a_quantised_checkpoint",
            "engine/integration/test_rounded_weights.py::test_gradients_and_steps_on_every_mesh",
            "e2e/test_fp8.py::test_a_rollout_in_fp8_follows_a_trainer_that_rounds_its_weights",
        ),
    ),
    Feature(
        "verl's own engine cases",
        "actor and critic through Ray worker groups",
        "",
        (
            "engine/integration/test_verl_engine_cases.py::test_actor_engine",
            "engine/integration/test_verl_engine_cases.py::test_critic_engine",
        ),
    ),
    Feature(
        "[settings of one role](settings.md#settings-of-one-role)",
        "verl's names and ours; verl's FSDP and SFT example scripts with two words added "
        "([each of them](../benchmarks/results/verl_scripts.md))",
        "keys whose meaning can't be kept; two spellings that contradict each other",
        (
            "engine/settings/test_role_settings.py::test_a_role_spelled_either_way_counts_before_engine",
            "e2e/test_verl_scripts.py::test_sft_script_with_two_words_trains",
            "e2e/test_verl_scripts.py::test_grpo_script_with_two_words_trains",
            "e2e/test_verl_scripts.py::test_fully_async_script_with_two_words_trains",
        ),
    ),
    Feature(
        "[float16](engine.md#float16)",
        "`dtype=float16` with parameters in float32 and a loss scale that adapts, is saved and resumed; a step that "
        "overflows on one rank is skipped by all optimizers on all; with chunks, checkpointing, offload, shared rows, "
        "LoRA and a critic; [what it changes](../benchmarks/results/dtypes.md)",
        "`model_dtype` or `reduce_dtype` in float16",
        (
            "engine/optim/test_loss_scale.py::test_scaled_loss_in_float32_gives_the_same_updates_bit_for_bit",
            "engine/optim/test_loss_scale.py::test_update_in_float16_has_the_gradients_of_float32_to_its_precision",
            "engine/optim/test_loss_scale.py::test_adapters_in_float16_have_the_gradients_of_float32_to_its_precision",
            "engine/integration/test_value_update.py::test_gradients_equal_the_plain_model",
            "engine/optim/test_loss_scale.py::"
            "test_overflow_in_one_expert_of_one_rank_skips_the_step_of_all_optimizers_on_all_ranks",
        ),
    ),
    Feature(
        "dense models",
        "plain FSDP2 by the same recipe, as actor, critic or both; `ep_size` counts for the roles whose model has "
        "experts, another one says so in a line",
        "`ep_size` and other settings of experts where no trained model has any; models whose experts are elsewhere",
        (
            "engine/preflight/test_preflight.py::test_a_dense_model_beside_another_is_sharded_over_all_ranks",
            "engine/preflight/test_preflight.py::test_a_setting_of_experts_for_a_dense_model_alone_is_refused",
            "engine/integration/test_value_update.py::test_gradients_equal_the_plain_model",
            "e2e/test_ppo.py::test_ppo_run_with_a_dense_critic_beside_experts_trains_both",
        ),
    ),
    Feature(
        "models",
        "every Mixture-of-Experts on transformers' experts interface, Llama 4 and Granite ([each](families.md))",
        "experts outside that interface (dbrx, jetmoe, ...) that [nobody has added](new_family.md); liger; "
        "tiled MLP; multi-token prediction",
        (
            "parity/test_parity.py::test_every_family_equals_the_plain_model",
            "engine/moe/test_refused_families.py::test_a_family_outside_the_interface_is_refused_with_a_reason",
            "engine/preflight/test_preflight.py::test_what_the_engine_does_not_do_is_refused",
        ),
    ),
)
