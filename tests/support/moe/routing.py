"""Routings that a dispatcher meets, of which some leave ranks or experts without tokens."""

from collections.abc import Iterator

import torch

__all__ = ["EXPERTS", "D", "K", "routings"]

EXPERTS, K, D = 8, 2, 5


def routings(rank: int, world: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a name of each routing, and this rank's expert ids [T, K]; the ranks' differ."""
    generator = torch.Generator().manual_seed(rank)
    random = torch.randint(0, EXPERTS, (7, K), generator=generator)
    yield "random", random
    yield "all to one expert", torch.full((6, K), 3)
    yield "an expert twice in one token", torch.full((4, K), rank % EXPERTS)
    yield "nobody here", random[:0] if rank == 0 else random
    yield "nobody anywhere", random[:0]
    yield "one rank receives all", torch.randint(0, EXPERTS // world, (5, K), generator=generator)
    yield "different counts", random[: rank + 1]
    yield "int32 ids", random.int()
