"""The cache of the Hugging Face hub as ``from_pretrained`` leaves it, made by hand."""

import hashlib
import shutil
from collections.abc import Container
from pathlib import Path

import huggingface_hub.constants as hub

__all__ = ["COMMIT", "save_in_hub_cache", "use_hub_cache"]

COMMIT = "0123456789abcdef" * 2 + "01234567"


def save_in_hub_cache(
    cache: Path, hub_id: str, folder: Path, without: Container[str] = (), commit: str = COMMIT
) -> Path:
    """Put a model's folder into a cache, its files as links to blobs, and return the folder of the snapshot.

    Args:
        without: names of files that were not downloaded.
    """
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for new in (snapshot, repository / "blobs", repository / "refs"):
        new.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    for file in folder.iterdir():
        if file.name not in without:
            blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            shutil.copyfile(file, blob)
            (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot


def use_hub_cache(cache: Path, offline: bool = True) -> None:
    """Make this process use a cache, as HF_HUB_CACHE and HF_HUB_OFFLINE do at its start."""
    hub.HF_HUB_CACHE, hub.HF_HUB_OFFLINE = str(cache), offline
