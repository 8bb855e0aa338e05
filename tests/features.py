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
            "e2e/trainers/test_quickstart.py::test_quickstart_raises_the_reward_with_the_trainers_weights_in_vllm",
            "e2e/trainers/test_trainers.py::test_sft_trainer_lowers_the_loss",
            "e2e/trainers/test_trainers.py::test_colocate_async_trainer_trains",
            "e2e/trainers/test_standalone.py::test_standalone_rollout_follows_the_trainer",
            "e2e/trainers/test_trainers.py::test_one_step_off_trainer_trains",
            "e2e/trainers/test_trainers.py::test_fully_async_trainer_trains",
            "engine/preflight/test_rollout.py::test_rollout_of_any_kind_gets_full_tensors_and_only_vllm_slices",
            "e2e/sglang/test_sglang.py::test_sglang_run_raises_the_reward_and_agrees_with_the_trainer",
        ),
    ),
    Feature(
        "losses and algorithms",
        "all policy losses of verl 0.9.1 (PPO, GSPO, SAPO, CISPO, DPPO, GMPO, GPG, DRO, Clip-Cov, KL-Cov, bypass) and "
        "ways to aggregate; DAPO; GAE, GRPO, Dr.GRPO, REINFORCE++, RLOO, OPO; rollout correction; entropy "
        "bonus; KL losses; distillation by estimators and top-k",
        "top-k distillation with fused kernels or `pad_to_length`",
        (
            "engine/integration/test_algorithms.py::test_update_with_every_algorithm_equals_the_plain_model",
            "engine/integration/test_algorithms.py::test_update_cases_name_every_policy_loss_of_verl",
            "e2e/trainers/test_dapo.py::test_dapo_run_filters_groups_and_punishes_long_answers",
            "engine/preflight/test_features.py::test_top_k_distillation_without_logits_of_the_batchs_tokens_is_refused",
        ),
    ),
    Feature(
        "[agents](engine.md#agents)",
        "several turns and tools; responses cut off within a turn; partial rollouts of fully-async, whose tokens keep "
        "their log-probs",
        "",
        (
            "engine/integration/test_multi_turn.py::test_update_of_turns_with_a_tool_equals_the_plain_model",
            "e2e/agents/test_agents.py::test_agent_that_calls_a_tool_raises_its_reward",
            "e2e/agents/test_agents.py::test_agent_loop_with_a_tool_records_routes_of_its_answers_and_masks_them_in_the_loss",
            "e2e/trainers/test_partial_rollouts.py::"
            "test_partial_rollout_keeps_the_log_prob_of_the_weights_that_wrote_each_token",
        ),
    ),
    Feature(
        "critic",
        "one-output head from a causal LM or a checkpoint with a head; GAE, warm-up, its own optimizer and checkpoints",
        "",
        (
            "engine/integration/test_value_update.py::test_critic_update_with_every_head_has_the_gradients_of_the_plain_model",
            "engine/integration/test_value_update.py::test_critic_with_adapters_trains_them_and_its_head",
            "engine/integration/test_value_update.py::test_critic_of_a_trained_head_reads_it_also_without_a_class_in_transformers",
            "e2e/trainers/test_ppo.py::test_ppo_run_with_critic_and_reference_raises_the_reward",
        ),
    ),
    Feature(
        "reference policy, KL in loss and in reward",
        "forward only, offloaded",
        "",
        (
            "engine/integration/test_ppo_update.py::test_reference_policy_of_packed_or_padded_rows_is_forward_only",
            "e2e/trainers/test_ppo.py::test_ppo_run_with_critic_and_reference_raises_the_reward",
        ),
    ),
    Feature(
        "batches",
        "[packed](engine.md#packed-rows), in every family, and padded; dynamic sizes, temperature, entropy chunked and "
        "recomputed, `pad_to_length`",
        "GLM-4.5V and ERNIE-4.5-VL packed with flash attention",
        (
            "engine/integration/test_ppo_update.py::test_ppo_update_on_every_mesh_has_the_gradients_and_norm_of_the_plain_model",
            "engine/packing/test_packing.py::test_packed_sequences_of_every_family_equal_separate_ones",
            "engine/packing/test_packing.py::test_packed_sequences_in_ppo_updates_equal_the_plain_model",
        ),
    ),
    Feature(
        "longrope, dynamic NTK",
        "[frequencies](engine.md#packed-rows) of each sequence alone, or of a vLLM's `max_model_len`",
        "SGLang with dynamic NTK, or sequences beyond longrope's short factors",
        (
            "engine/packing/test_positions.py::test_positions_in_ppo_updates_are_those_of_each_alone",
            "rollout/vllm/test_vllm_positions.py::test_longrope_of_an_actor_beside_vllm_is_chosen_by_its_max_model_len",
        ),
    ),
    Feature(
        "log-probs without whole logits",
        "[`engine.chunked_logits`](engine.md#log-probs-and-entropy), by default; whole logits where they are scaled, "
        "capped or read",
        "",
        (
            "engine/head/test_head.py::test_head_in_parts_of_every_family_is_exact_or_keeps_whole_logits",
            "engine/head/test_head.py::test_head_in_parts_where_verl_reads_logits_keeps_them_whole",
        ),
    ),
    Feature(
        "fused RMSNorms and rotary embeddings",
        "[`engine.fuse_dense`](engine.md#fused-norms-and-rotary-embeddings), by default on a GPU; recognised by what "
        "they compute",
        "LayerNorm, norms without a weight or with a gate; rotary embeddings of vision towers; sums of residuals",
        (
            "engine/dense/test_norms.py::test_every_family_has_its_rms_norms_fused",
            "engine/dense/test_norms.py::test_model_with_fused_norms_has_its_loss_and_gradients",
            "engine/dense/test_rotary.py::test_attention_of_every_family_calls_the_fused_rotary",
            "engine/dense/test_rotary.py::test_model_with_fused_rotary_has_its_loss_and_gradients",
        ),
    ),
    Feature(
        "fused linear cross-entropy",
        "`use_fused_kernels`",
        "heads with a bias or scaled logits",
        (
            "engine/integration/test_fused_kernels.py::test_fused_kernels_of_every_family_are_exact_or_refused",
            "engine/integration/test_fused_kernels.py::test_fused_kernels_in_an_update_equal_the_plain_model",
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
            "engine/planner/test_held_memory.py::test_gathered_parameters_after_each_phase_are_freed",
            "engine/fsdp/test_activation_checkpoint.py::test_activation_offload_moves_layer_inputs_off_the_device_and_changes_no_gradient",
        ),
    ),
    Feature(
        "[sequence parallelism](engine.md#sequence-parallelism)",
        "Ulysses for every family on transformers' attention interface; linear attention and state spaces; images; "
        "every `ep`, HSDP, critic, replay",
        "padded batches; an indexer that chooses keys (GLM-MoE-DSA, DeepSeek-V4)",
        (
            "engine/fsdp/test_ulysses.py::test_ulysses_of_every_family_equals_the_plain_model",
            "engine/packing/test_shared_mixers.py::test_shared_mixer_of_every_family_with_a_state_equals_the_plain_model",
            "engine/model/test_vision.py::test_vision_updates_of_shared_rows_equal_the_plain_model",
            "engine/fsdp/test_ulysses.py::test_check_attention_splits_of_other_token_mixers_refuses_them",
            "e2e/models/test_sequence_parallel.py::test_sequence_parallel_run_trains",
        ),
    ),
    Feature(
        "[router replay](engine.md#router-replay)",
        "R2 and R3, with every checkpointing",
        "padded batches; R2 with bypass mode; ERNIE-4.5-VL, Llama 4",
        (
            "engine/moe/router/test_router_replay.py::test_replay_of_every_family_takes_the_recorded_routes",
            "engine/moe/router/test_router_replay.py::test_replay_of_unusable_routes_raises",
            "e2e/models/test_router_replay.py::test_router_replay_of_rollout_routes_brings_log_probs_together",
        ),
    ),
    Feature(
        "[expert tensor parallelism](engine.md#expert-tensor-parallelism)",
        "`engine.etp_size` with every family, `ep`, HSDP, shard dim, checkpointing, chunks, Muon, LoRA, replay, shared "
        "rows, offload; any mesh to resume on; slices to vLLM",
        "sizes that do not divide; `dispatcher=deepep`; `delta_sharded`; experts of an `expert_plan`; Muon where "
        "`ep_fsdp` cuts matrices too",
        (
            "parity/test_parity.py::test_training_of_every_family_equals_the_plain_model",
            "engine/moe/test_expert_tensor_parallel.py::test_etp_in_ppo_updates_equals_the_plain_model",
            "engine/checkpoint/test_resume_matrix.py::test_resume_of_every_mesh_on_every_other_equals_an_uninterrupted_run",
            "rollout/test_engine_to_vllm.py::test_vllm_workers_after_each_of_two_syncs_hold_the_trainers_weights",
            "engine/preflight/test_training.py::test_etp_size_that_does_not_fit_is_refused_with_those_that_do",
            "e2e/models/test_expert_tensor_parallel.py::test_run_with_cut_experts_trains_and_vllm_has_its_weights",
        ),
    ),
    Feature(
        "[LoRA](engine.md#lora)",
        "linears and experts; to vLLM merged (`lora.merge=True`) or alone, those of experts on GPUs only; rsLoRA, DoRA "
        "of linears, `modules_to_save`, patterns; a peft adapter in each checkpoint; the base as reference",
        "dropout; DoRA of experts; sent alone: DoRA, `modules_to_save`, patterns of ranks",
        (
            "engine/lora/test_peft.py::test_adapters_of_every_setting_equal_those_of_peft",
            "engine/lora/test_peft.py::test_adapters_that_peft_has_saved_are_read_unchanged",
            "engine/lora/test_lora_files.py::test_lora_resumes_on_another_mesh_and_exports_merged_weights",
            "engine/optim/test_muon.py::test_muon_on_adapters_steps_like_torch_muon_on_their_matrices",
            "engine/lora/test_lora.py::test_lora_log_probs_gradients_and_two_updates_equal_the_plain_model",
            "engine/lora/test_lora_files.py::test_lora_adapter_that_was_saved_is_loaded_by_peft",
            "engine/lora/test_lora_settings.py::test_lora_check_refuses_bad_settings",
            "rollout/remote/test_checkpoint_engine.py::test_checkpoint_engine_sends_the_base_once_and_adapters_in_every_sync",
            "rollout/test_adapters.py::test_adapters_alone_equal_those_that_vllm_loads_from_a_file",
            "e2e/models/test_lora.py::test_lora_run_trains_adapters_that_reach_the_rollout",
            "e2e/trainers/test_standalone.py::test_standalone_rollout_gets_the_base_once_and_then_adapters",
            "e2e/trainers/test_trainers.py::test_one_step_off_trainer_sends_the_base_once_and_then_adapters",
            "e2e/trainers/test_trainers.py::test_fully_async_trainer_sends_the_base_once_and_then_adapters",
            "engine/integration/test_value_update.py"
            "::test_a_critics_adapter_is_checked_with_its_head_before_a_worker_starts",
        ),
    ),
    Feature(
        "[images](engine.md#images)",
        "Qwen3-VL-MoE and GLM-4.5V, also if some ranks have none; `freeze_vision_tower`",
        "ERNIE-4.5-VL, Qwen3-Omni, Gemma 4; audio",
        (
            "engine/model/test_vision.py::test_vision_updates_of_two_steps_equal_the_plain_model",
            "engine/model/test_vision.py::test_vision_updates_with_a_frozen_tower_equal_the_plain_model",
            "engine/model/test_vision.py::test_vision_updates_of_glm4v_moe_equal_the_plain_model",
            "rollout/vllm_workers/test_vllm_images.py::test_vllm_sees_an_image_as_a_fresh_engine_on_the_export_does",
            "e2e/models/test_images.py::test_grpo_run_on_images_trains",
        ),
    ),
    Feature(
        "[optimizers](engine.md#optimizers-and-schedules)",
        "`optim.optimizer`: every elementwise one; `Muon`, for each expert's matrices apart",
        "Adafactor, LBFGS, Rprop, SparseAdam; others that use a norm or mean of a weight; 8-bit states",
        (
            "engine/optim/test_every_optimizer.py::"
            "test_every_accepted_optimizer_steps_as_on_the_plain_model_and_resumes_bit_for_bit",
            "engine/optim/test_optimizer_settings.py::test_optimizer_from_config_chooses_the_algorithms",
            "engine/optim/test_muon.py::test_muon_two_steps_of_training_equal_the_reference",
        ),
    ),
    Feature(
        "[checkpoints](checkpoints.md)",
        "resume on any mesh; saves in the background; Hugging Face models out (`hf_model`, `recipes.export`); in: "
        "verl's fsdp2 checkpoints (`recipes.import_fsdp2`), FP8, INT4, MXFP4, NVFP4 (`recipes.dequantise`)",
        "",
        (
            "engine/checkpoint/test_resume_matrix.py::test_resume_of_every_mesh_on_every_other_equals_an_uninterrupted_run",
            "e2e/failures/test_resume.py::test_run_resumed_from_a_background_save_continues",
            "recipes/test_export.py::test_export_of_a_trained_model_has_its_weights_bit_for_bit",
            "recipes/test_import_fsdp2.py::test_import_of_a_run_of_verls_goes_on_here",
            "recipes/test_dequantise.py::test_dequantise_of_a_model_equals_what_transformers_makes_of_it",
        ),
    ),
    Feature(
        "[weight sync](weight_sync.md)",
        "colocated, and to rollouts apart from the trainer (`checkpoint_engine.backend=epfsdp2_p2p`, or verl's own)",
        "",
        (
            "e2e/trainers/test_quickstart.py::test_sync_of_every_step_leaves_the_trainers_weights_in_every_worker",
            "rollout/vllm_workers/test_vllm_families.py::test_vllm_of_every_family_after_three_syncs_of_slices_equals_a_fresh_engine",
            "rollout/test_other_backends.py::"
            "test_other_backends_that_iterate_get_full_tensors_and_delta_gets_what_has_changed",
            "e2e/trainers/test_standalone.py::test_standalone_rollout_follows_the_trainer",
        ),
    ),
    Feature(
        "[rollouts in FP8](weight_sync.md#rollouts-in-fp8)",
        "`rollout.quantization=fp8`: slices of 32 families with vLLM's bits, full tensors of others; FP8 and INT8 by "
        "rows (compressed-tensors); `engine.rollout_quantization_aware`; also to workers apart from the trainer",
        "tensor-parallel sizes that cut a block of 128 x 128; other kinds of compressed-tensors",
        (
            "rollout/quantise/test_quantise.py::test_quantise_of_slices_has_the_bits_that_vllm_makes_of_the_whole_weights",
            "rollout/layout/test_fp8_families.py::test_fp8_slices_of_every_family_are_where_vllms_loaders_put_them",
            "rollout/quantise/test_channels.py::test_slices_with_scales_of_rows_are_those_of_the_whole_weights",
            "rollout/vllm_workers/test_vllm_fp8.py::test_vllm_fp8_workers_after_syncs_hold_what_vllm_loads_of_a_quantised_checkpoint",
            "engine/integration/test_rounded_weights.py::test_gradients_and_steps_on_every_mesh",
            "rollout/remote/test_remote_quantised.py::test_quantised_weights_of_hsdp_trainers_have_vllms_bits_in_separate_workers_every_sync",
            "e2e/models/test_fp8.py::test_a_rollout_in_fp8_follows_a_trainer_that_rounds_its_weights",
        ),
    ),
    Feature(
        "verl's own engine cases",
        "actor and critic through Ray worker groups",
        "",
        (
            "engine/integration/test_verl_engine_cases.py::test_actor_engine_in_verls_workers_equals_the_plain_model_and_resumes",
            "engine/integration/test_verl_engine_cases.py::test_critic_engine_in_verls_workers_equals_the_plain_model",
        ),
    ),
    Feature(
        "[settings of one role](settings.md#settings-of-one-role)",
        "verl's names and ours; verl's FSDP and SFT example scripts with two words added "
        "([each of them](../benchmarks/results/verl_scripts.md))",
        "keys whose meaning can't be kept; two spellings that contradict each other",
        (
            "engine/settings/test_role_settings.py::test_role_settings_spelled_either_way_override_engine",
            "e2e/trainers/test_verl_scripts.py::test_sft_script_with_two_words_trains",
            "e2e/trainers/test_verl_scripts.py::test_grpo_script_with_two_words_trains",
            "e2e/trainers/test_verl_scripts.py::test_fully_async_script_with_two_words_trains",
        ),
    ),
    Feature(
        "[float16](engine.md#float16)",
        "`dtype=float16` with parameters in float32 and an adaptive loss scale, which is saved; all ranks skip a step "
        "that overflows on one; [results](../benchmarks/results/runs.md)",
        "`model_dtype` or `reduce_dtype` in float16",
        (
            "engine/optim/test_loss_scale.py::test_scaled_loss_in_float32_gives_the_same_updates_bit_for_bit",
            "engine/optim/test_loss_scale.py::test_update_in_float16_has_the_gradients_of_float32_to_its_precision",
            "engine/optim/test_loss_scale.py::test_adapters_in_float16_have_the_gradients_of_float32_to_its_precision",
            "engine/integration/test_value_update.py::test_critic_update_with_every_head_has_the_gradients_of_the_plain_model",
            "engine/optim/test_loss_scale.py::"
            "test_overflow_in_one_expert_of_one_rank_skips_the_step_of_all_optimizers_on_all_ranks",
        ),
    ),
    Feature(
        "dense models",
        "plain FSDP2, as actor, critic or both; `ep_size` counts for roles whose model has experts",
        "settings of experts if no trained model has any",
        (
            "engine/preflight/test_dense_models.py::test_check_training_of_a_dense_model_beside_experts_applies_no_ep_size",
            "engine/preflight/test_dense_models.py::test_setting_of_experts_for_a_dense_model_alone_is_refused",
            "engine/integration/test_value_update.py::test_critic_update_with_every_head_has_the_gradients_of_the_plain_model",
            "e2e/trainers/test_ppo.py::test_ppo_run_with_a_dense_critic_beside_experts_trains_both",
        ),
    ),
    Feature(
        "models",
        "every Mixture-of-Experts on transformers' experts interface, Llama 4, Granite, DBRX ([each](families.md))",
        "[other experts](new_family.md) (jetmoe, longcat_flash, ...); liger; tiled MLP; multi-token prediction",
        (
            "parity/test_parity.py::test_training_of_every_family_equals_the_plain_model",
            "engine/moe/test_refused_families.py::test_find_experts_of_a_family_outside_the_interface_refuses_with_a_reason",
            "engine/preflight/test_features.py::test_check_training_of_unsupported_settings_refuses_each",
        ),
    ),
)
