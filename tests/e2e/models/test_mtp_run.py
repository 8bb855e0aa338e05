"""GRPO with a multi-token prediction layer, which learns to draft as the policy does."""

from dataclasses import replace
from statistics import mean

import pytest

from epfsdp2.recipes.quickstart.model import build_tokenizer
from tests.e2e.models.small_families import settings
from tests.e2e.runs import differences, finished, overrides
from tests.rollout.served_families import SERVED
from tests.support.models.mtp import save_with_mtp

pytestmark = [pytest.mark.e2e, pytest.mark.long]


MTP = "actor_rollout_ref.model.mtp"
RUNS = {
    "trained": ["engine.mtp_loss_coef=1.0"],
    "trained and drafting in the rollout": [
        *(f"{MTP}.{name}=True" for name in ("enable", "enable_train", "detach_encoder", "enable_rollout")),
        f"{MTP}.mtp_loss_scaling_factor=1.0",
    ],
}
# Cached states of linear attention are copied by a Triton kernel where there are drafts.
MORE = {"glm4_moe": [], "qwen3_next": ["actor_rollout_ref.rollout.enable_prefix_caching=False"]}


@pytest.mark.parametrize(("family", "name"), [*(("glm4_moe", name) for name in RUNS), ("qwen3_next", [*RUNS][1])])
def test_drafts_of_a_grpo_run_agree_more_and_more_with_the_policy(tmp_path, family, name):
    tokenizer, recipe = build_tokenizer(), SERVED[family].family
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {**recipe.sizes, "hidden_size": 128, "max_position_embeddings": 128, "vocab_size": len(tokenizer), **ids}
    model = save_with_mtp(tmp_path / "model", replace(recipe, sizes=sizes), 1)
    tokenizer.save_pretrained(model)
    options = overrides(*RUNS[name], *settings(family), *MORE[family])
    steps = finished(tmp_path / "run", 16, "--model", str(model), *options).steps()
    agreement = [step["actor/mtp_agreement"] for step in steps]
    assert mean(agreement[-3:]) > mean(agreement[:3]) + 0.1, agreement
    assert steps[-1]["actor/mtp_loss"] < steps[0]["actor/mtp_loss"]
    assert max(differences(steps)) < (1e-5 if SERVED[family].dtype == "float32" else 2e-2)
