"""An update from a checkpoint that looks like a published one equals the plain model's, in every spelling."""

from pathlib import Path

from tests.parity.float64 import float64
from tests.support.models.hub import save_in_hub_cache
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import each_case, run_ranks
from tests.support.trainer.ppo import check_ppo_updates_in_float64

ROPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


def _updates(folders: list[Path]) -> None:
    each_case([(folder, [{"ep": 2}]) for folder in folders], check_ppo_updates_in_float64)


def test_ppo_update_from_every_variant_of_a_published_checkpoint_equals_the_plain_model(tmp_path):
    folders = []
    for seed, rope in enumerate(ROPES):
        sizes = {"rope_parameters": {"rope_theta": 1e4, **rope}, "tie_word_embeddings": seed > 1}
        with float64():
            folders.append(save_qwen3_moe(tmp_path / f"{seed}", seed, **sizes))
    folders[-1] = save_in_hub_cache(tmp_path / "cache", "some/moe", folders[-1])
    run_ranks(_updates, 2, folders)
