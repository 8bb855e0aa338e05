"""Write one rank's part of a checkpoint without a collective.

A replica (HSDP) holds each shard once, so that the ranks of one replica, or of several that together hold all of it,
write a whole checkpoint; ``state.py`` says what is in one. Left out are the weights in Hugging Face's layout and the
adapters as peft saves them, which are made of all shards.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file

from ..checkpoint.atomic_folder import file_facts, file_names
from ..checkpoint.state import HF, RNG, SHARDS, STATE, Snapshot
from ..checkpoint.stored_shards import write_shards
from ..topology.dtensor import is_first_holder

__all__ = ["write_rank"]


def write_rank(
    snapshot: Snapshot, folder: Path, rank: int, position: int, describe: Callable[[Path], None]
) -> dict[str, dict[str, int]]:
    """Write the shards of a rank, and what is written once if it is the first of its replica.

    Args:
        snapshot: in host memory.
        folder: may be written into by other ranks at the same time.
        position: of the rank in its replica; others at the same position hold the same shards.
        describe: writes config and tokenizer into a folder.

    Returns:
        Size and checksum of each file, by its name in ``folder``.
    """
    own = folder / f"rank-{rank}"
    for name in (SHARDS, RNG, HF):
        (own / name).mkdir(parents=True)
    tensors = {name: tensor for name, tensor in snapshot.tensors.items() if is_first_holder(tensor, position)}
    write_shards(own / SHARDS, tensors, rank + 1, dist.get_world_size())
    if snapshot.random:
        save_file(snapshot.random, own / RNG / f"{rank:05d}.safetensors")
    if position == 0:
        (own / STATE).write_text(json.dumps(snapshot.facts))
        describe(own / HF)
    files = {name: file_facts(own / name, sync=True) for name in file_names(own)}
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).replace(folder / name)
    shutil.rmtree(own)
    return files
