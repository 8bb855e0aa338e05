"""An update from a checkpoint that looks like a published one equals the plain model's, in every spelling."""

import shutil
from pathlib import Path

from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import each_case, run_ranks
from tests.support.trainer.ppo import check_ppo_updates

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


def _as_hub_cache(folder: Path) -> Path:
    """Move a checkpoint into a cache of the hub; return the snapshot, whose files are links to blobs."""
    cache = folder.with_name(f"models--some--{folder.name}")
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    shutil.move(folder, blobs)
    for number, file in enumerate(sorted(blobs.iterdir())):
        blob = file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot


def _updates(folders: list[Path]) -> None:
    each_case([(folder, [{"ep": 2}]) for folder in folders], check_ppo_updates)


def test_ppo_update_from_every_variant_of_a_published_checkpoint_equals_the_plain_model(tmp_path):
    folders = []
    for seed, rope in enumerate(ROPES):
        sizes = {"rope_parameters": {"rope_theta": 1e4, **rope}, "tie_word_embeddings": seed > 1}
        folders.append(save_qwen3_moe(tmp_path / f"{seed}", seed, **sizes))
    run_ranks(_updates, 2, [*folders[:-1], _as_hub_cache(folders[-1])])
