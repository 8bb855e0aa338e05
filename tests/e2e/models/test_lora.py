"""GRPO with adapters, the base as the reference policy, and merged weights or the adapters alone in vLLM."""

import re

import pytest

from epfsdp2.engine.lora.peft_files import ADAPTER
from tests.e2e.runs import differences, finished, overrides

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEPS = 2


@pytest.mark.parametrize("sync", ["full", "sliced", "alone"])
def test_lora_run_trains_adapters_that_reach_the_rollout(folder, warmed_up, sync):
    kept = folder / f"lora_kept_{sync}"
    settings = overrides(
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.lora_alpha=32",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32",
        "engine.rollout_sync_verify=-1",
        f"trainer.save_freq={STEPS}",
        f"trainer.default_local_dir={kept}",
    )
    if sync == "alone":
        settings += overrides("actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj]")
    else:
        settings += overrides("actor_rollout_ref.model.lora.merge=True", f"engine.rollout_sync={sync}")
    if sync == "sliced":
        settings += overrides("actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    run = finished(folder / f"lora_{sync}", STEPS, "--model", warmed_up, *settings)
    steps = run.steps()
    # The reference is the base, which only the first step is equal to.
    assert steps[0]["actor/kl_loss"] == 0 and steps[1]["actor/kl_loss"] > 1e-4, [s["actor/kl_loss"] for s in steps]
    # vLLM generated with the trainer's weights, adapters included.
    assert max(differences(steps)) < 1e-4
    if sync == "alone":
        log = (run.output / "logs" / "grpo.log").read_text(errors="replace")
        kinds = re.findall(r"weight sync (\d+), (\w+)", log)
        assert kinds == [("1", "sliced"), ("2", "adapters"), ("3", "adapters"), ("4", "adapters")]
    assert (kept / f"global_step_{STEPS}" / "actor" / ADAPTER / "adapter_model.safetensors").is_file()
