"""Draw a plan: the shards of each rank, and its memory by part."""

from pathlib import Path

from ...engine.planner.model_sizes import ModelSizes
from ...engine.topology.mesh import Topology
from .meshes import Choice
from .roofline import Cluster

__all__ = ["draw"]

_GIB = 1 << 30
_RANKS = 64  # drawn at most


def draw(model: str, sizes: ModelSizes, choice: Choice, cluster: Cluster, path: Path) -> None:
    """Write a PNG: ranks by node with their experts, and the memory of one rank by part."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    t = choice.topology
    shown, per_row = min(t.world, _RANKS), cluster.gpus
    rows = -(-shown // per_row)
    figure, (ranks, memory) = plt.subplots(
        2, 1, figsize=(max(8, 1.5 * per_row), 2.5 + rows), layout="constrained", height_ratios=[rows, 1.2]
    )
    colours = plt.get_cmap("viridis")
    for rank in range(shown):
        column, row = rank % per_row, rows - 1 - rank // per_row
        at = t.coordinate(rank % t.fsdp)
        ranks.add_patch(Rectangle((column, row), 0.95, 0.9, color=colours(at["ep"] / max(t.ep, 2)), alpha=0.35))
        ranks.text(column + 0.47, row + 0.45, held(rank, t, sizes), ha="center", va="center", fontsize=7)
    more = f" (the first {shown} of {t.world} ranks)" if shown < t.world else ""
    ranks.set(
        xlim=(0, per_row), ylim=(0, rows), xticks=[], ylabel="node", title=f"{model}: {' '.join(choice.settings)}{more}"
    )
    ranks.set_yticks([rows - 0.55 - i for i in range(rows)], [str(i) for i in range(rows)])

    left = 0.0
    for part, nbytes in {**choice.peak.parts, "reserve": choice.reserve * _GIB}.items():
        memory.barh(0, nbytes / _GIB, left=left, label=f"{part} {nbytes / _GIB:.1f}")
        left += nbytes / _GIB
    memory.axvline(cluster.gib, color="tab:red", linestyle="--", label=f"a GPU, {cluster.gib:g}")
    memory.set(yticks=[], xlabel=f"GiB of a rank at its peak ({choice.peak.when})")
    memory.legend(ncols=4, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.45))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def held(rank: int, topology: Topology, sizes: ModelSizes) -> str:
    """Return a label of a rank's shards, in at most three lines."""
    at = topology.coordinate(rank % topology.fsdp)
    experts = max(sizes.num_experts, default=0) // topology.ep
    parts = topology.ep_fsdp * topology.etp
    cut = f"1/{parts} of " if parts > 1 else ""
    copy = f"copy {rank // topology.fsdp}, " if topology.dp_replicate > 1 else ""
    first = at["ep"] * experts
    if not experts:
        return f"rank {rank}\n{copy}1/{topology.fsdp} of the model"
    return f"rank {rank}\n{cut}experts {first}-{first + experts - 1}\n{copy}1/{topology.fsdp} of the rest"
