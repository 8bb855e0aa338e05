"""Tests of the inner loop (``make test-fast``): the core's, in under three minutes on two cores.

None starts vLLM or Ray. A listed file includes its future tests. Tests over ten seconds of a core run in ``make test``.
"""

__all__ = ["FAST", "LEFT_OUT", "is_fast"]

# Files, and tests in files.
FAST = (
    "tests/engine/checkpoint/test_checkpoint.py",
    "tests/engine/checkpoint/test_background_saves.py",
    "tests/engine/optim/test_clip.py",
    "tests/engine/config/test_settings.py",
    "tests/engine/moe/test_dispatch.py",
    "tests/engine/test_exactness.py::test_training_on_every_mesh_has_the_gradients_norm_and_steps_of_the_plain_model[usual]",
    "tests/engine/test_exactness.py::test_gradient_reduction_in_bfloat16_or_over_gloo_on_a_gpu_sums_and_divides_after",
    "tests/engine/moe/gemm/test_experts_backend.py",
    "tests/engine/moe/gemm/test_kernels.py",
    "tests/engine/checkpoint/test_load.py",
    "tests/engine/planner/test_memory_plan.py",
    "tests/engine/topology/test_mesh.py",
    "tests/engine/optim/test_optimizer.py",
    "tests/engine/optim/test_optimizer_settings.py",
    "tests/engine/test_order.py",
    "tests/engine/config/test_role_settings.py",
    "tests/recipes/test_plan.py",
    "tests/rollout/transport/test_checksums.py",
    "tests/rollout/transport/test_exchange.py",
    "tests/rollout/layout/test_layout_check.py",
    "tests/engine/model/test_hf_names.py",
    "tests/rollout/layout/test_transfer_plan.py",
    "tests/rollout/transport/test_full.py",
    "tests/test_docs.py",
    "tests/test_sentences.py",
    "tests/test_walls.py",
)
LEFT_OUT = (
    "tests/engine/config/test_settings.py::test_engine_config_unpickled_in_a_new_process_registers_the_engine",
    "tests/test_walls.py::test_old_name_of_the_worker_extension_leads_to_the_code",
    "tests/test_server_walls.py::test_checkpoint_engine_is_registered_by_the_module_that_configs_name",
)


def is_fast(test: str) -> bool:
    """Whether ``make test-fast`` runs the test with this id."""
    return test.startswith(FAST) and not test.startswith(LEFT_OUT)
