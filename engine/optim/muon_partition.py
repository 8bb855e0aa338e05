"""Which matrices the hidden layers of a model have, where in the parameters they are, and which rank gets which.

What a rank holds of a parameter is a box, and a matrix is a region of the parameter, strided where parts alternate. So
everything here is arithmetic on sizes, and comes out equal on all ranks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..model.layers import layer_names
from ..moe.find import UnsupportedModelError, find_experts
from ..topology.dtensor import local_range, shard_steps
from ..topology.index_ranges import ShardStep

__all__ = [
    "Block",
    "Bucket",
    "Layout",
    "Piece",
    "matrix_shard_step",
    "matrix_groups",
    "muon_parameters",
    "build_buckets",
]

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout:
    """How a parameter ``[rows, cols]`` or ``[E, rows, cols]`` is made of matrices.

    Args:
        parts: matrices side by side along the output dim: 2 for gate and up in one weight.
        out_dim: the output dim, -2, or -1 where weights are stored transposed.
        interleaved: whether the parts alternate along the output dim (gpt-oss) rather than follow each other.
    """

    parts: int = 1
    out_dim: int = -2
    interleaved: bool = False


def muon_parameters(model: nn.Module) -> dict[str, Layout]:
    """The parameters that are matrices of hidden layers, by name, with how they are made of matrices.

    * Stacked expert weights ``[E, ..., ...]`` on transformers' experts interface, one matrix per expert, gate and up
      apart. Their layout is what the module's flags and its ``_apply_gate`` say.
    * 2-D weights of ``nn.Linear`` inside the model's layers. A fused projection (q, k and v in one) is one matrix.

    Everything else is for AdamW: embeddings and head; routers, which are linear only in name, each row of theirs
    scores one expert; norms, biases (the experts' stacked ones too), convolutions, free parameters; a linear of one
    output or one input; experts that only a user's plan describes, for their layout isn't known.
    """
    found: dict[str, Layout] = {}
    try:
        experts = find_experts(model)
    except UnsupportedModelError:
        experts = []
    for info in experts:
        module: Any = info.module
        out_dim = -1 if module.is_transposed else -2
        for name, param in module.named_parameters(recurse=False):
            if param.dim() == 3:
                gated = module.has_gate and name == "gate_up_proj"
                parts = Layout(2, out_dim, _is_interleaved(module)) if gated else Layout(1, out_dim)
                found[f"{info.fqn}.{name}"] = parts
    layers = tuple(f"{name}." for name in layer_names(model))
    routers = _routers(model, {info.fqn: info.num_experts for info in experts} | _planned_experts(model))
    for fqn, module in model.named_modules():
        linear = isinstance(module, nn.Linear) and fqn.startswith(layers) and module not in routers
        if linear and module.weight.dim() == 2 and min(module.weight.shape) > 1:
            found[f"{fqn}.weight"] = Layout()
    # In the model's order, and without what is frozen or tied to something outside.
    return {name: found[name] for name, p in model.named_parameters() if name in found and p.requires_grad}


def matrix_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups for ``Muon``: one per layout that occurs in the model."""
    groups: dict[Layout, list[nn.Parameter]] = {}
    params = dict(model.named_parameters())
    for name, layout in muon_parameters(model).items():
        groups.setdefault(layout, []).append(params[name])
    return [{"params": members, **vars(layout)} for layout, members in groups.items()]


def _is_interleaved(experts: Any) -> bool:
    """Whether gate and up alternate in the columns that ``_apply_gate`` takes, or follow each other.

    Asked of the function that computes: transformers before the flag ``is_concatenated`` had interleaved families too.
    """
    columns = torch.tensor([[0.5, 0.6, 0.7, 0.8], [0.5, 0.3, 0.7, 0.8]], device="cpu")
    # The second column is the first output's up where they alternate, and no business of its where they don't.
    first, other = experts._apply_gate(columns)[:, 0].tolist()
    return first != other


def _planned_experts(model: nn.Module) -> dict[str, int]:
    """Modules whose parameters are cut over ``ep``, with their number of experts: a user's plan may have said so."""
    found = {}
    for name, param in model.named_parameters():
        for cut in shard_steps(param):
            if cut.axis == "ep":
                found[name.rpartition(".")[0]] = param.shape[cut.dim]
    return found


def _routers(model: nn.Module, experts: Mapping[str, int]) -> set[nn.Module]:
    """Modules that score experts: those that transformers records as such, and what stands beside the experts with one
    output per expert.

    Args:
        experts: name of each experts module -> number of its experts.
    """
    classes: list[type] = []
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
        for entry in recorded if isinstance(recorded, (list, tuple)) else [recorded]:
            target = getattr(entry, "target_class", entry)
            # jamba records the linears of a certain name: those stand beside experts.
            if isinstance(target, type) and not issubclass(nn.Linear, target):
                classes.append(target)
    tops = [m for m in model.modules() if isinstance(m, tuple(classes))]
    routers = {m for top in tops for m in top.modules()}
    for fqn, count in experts.items():
        block = model.get_submodule(fqn.rpartition(".")[0])
        routers |= {m for m in block.modules() if isinstance(m, nn.Linear) and m.out_features == count}
    return routers


@dataclass(frozen=True)
class Piece:
    """The part of a block that one rank holds."""

    held: tuple[slice, ...]
    """Where in that rank's shard, seen as ``[e, rows, cols]``."""
    whole: tuple[slice, ...]
    """Where in the block."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Block:
    """Matrices of one parameter, of one part and neighbouring experts, that go to the same owner together."""

    param: torch.Tensor
    shape: tuple[int, int, int]
    """Number of matrices, rows and columns of each."""
    pieces: tuple[Piece, ...]
    """By rank of the group."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def cost(self) -> int:
        count, rows, cols = self.shape
        short, long = sorted((rows, cols))
        # Per iteration: two products of the size of the matrix, one of its gram matrix.
        return count * short * short * (2 * long + short)


@dataclass(frozen=True)
class Bucket:
    """What one pair of all-to-alls carries."""

    blocks: tuple[tuple[Block, ...], ...]
    """By owner, a rank of the group."""
    group: dist.ProcessGroup | None
    """None where matrices are whole on this rank."""
    rank: int
    device: torch.device
    dtype: torch.dtype

    def all_blocks(self) -> Iterator[Block]:
        return (block for owned in self.blocks for block in owned)


def build_buckets(
    params: Sequence[torch.Tensor], layout: Layout, ns_dtype: torch.dtype | None, bucket_bytes: int
) -> list[Bucket]:
    """Deal the matrices of ``params`` out; equal on all ranks of a group, for it uses nothing but sizes."""
    sharers: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for param in params:
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        sharers.setdefault((mesh, matrix_shard_step(param)), []).append(param)
    buckets: list[Bucket] = []
    for (mesh, cut), members in sharers.items():
        # Parameters that FSDP keeps on the CPU are still orthogonalised on the accelerator, and sent from there.
        device = torch.empty(0, device=mesh.device_type if mesh else members[0].device).device
        dtype = ns_dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        ranks = cut.parts if cut else 1
        rank, group = (mesh.get_local_rank(cut.axis), mesh.get_group(cut.axis)) if cut else (0, None)
        blocks = [b for p in members for b in _blocks(p, cut, layout, bucket_bytes // dtype.itemsize)]
        total = [0] * ranks
        for filled in _fill(blocks, ranks * bucket_bytes // dtype.itemsize, ranks):
            buckets.append(Bucket(_assign_to_ranks(filled, total), group, rank, device, dtype))
    return buckets


def _fill(blocks: Sequence[Block], limit: int, ranks: int) -> Iterator[list[Block]]:
    """Neighbouring blocks, together of at most ``limit`` elements or of one per rank, for nobody is to wait idle.

    None where a rank holds no expert: more ranks than experts share a dim 0.
    """
    if not blocks:
        return
    limit = max(limit, ranks * max(block.numel for block in blocks))
    filled: list[Block] = []
    size = 0
    for block in blocks:
        if filled and size + block.numel > limit:
            yield filled
            filled, size = [], 0
        filled.append(block)
        size += block.numel
    yield filled


def _assign_to_ranks(blocks: Sequence[Block], total: list[int]) -> tuple[tuple[Block, ...], ...]:
    """The most expensive first, each to the rank with least to do in this bucket, then in all so far (``total``)."""
    owned: list[list[Block]] = [[] for _ in total]
    load = [0] * len(total)
    for block in sorted(blocks, key=lambda b: -b.cost):
        owner = min(range(len(total)), key=lambda rank: (load[rank], total[rank]))
        owned[owner].append(block)
        load[owner] += block.cost
        total[owner] += block.cost
    return tuple(tuple(hand) for hand in owned)


def _blocks(param: torch.Tensor, cut: ShardStep | None, layout: Layout, limit: int) -> Iterator[Block]:
    """The blocks of a parameter: small enough to give every rank some, and to have at most ``limit`` elements."""
    ranks = cut.parts if cut else 1
    held = [local_range(param, {cut.axis: rank} if cut else {}) for rank in range(ranks)]
    boxes: list[Bounds] = [tuple(zip(box.low, box.high, strict=True)) for box in held]
    # A single matrix is a stack of one.
    boxes = [((0, 1), *box) if param.dim() == 2 else box for box in boxes]
    first, last = boxes[0][0]
    sizes = list(param.shape[-2:])
    out_dim = layout.out_dim + 2
    for part in range(layout.parts):
        each = sizes[out_dim] // layout.parts
        region = [slice(0, size, 1) for size in sizes]
        if layout.interleaved:
            region[out_dim] = slice(part, sizes[out_dim], layout.parts)
        else:
            region[out_dim] = slice(part * each, (part + 1) * each, 1)
        shape = [len(range(s.start, s.stop, s.step)) for s in region]
        count = max(1, min(-(-(last - first) // ranks), limit // math.prod(shape)))
        for start in range(first, last, count):
            stop = min(start + count, last)
            pieces = tuple(_piece(box, [slice(start, stop, 1), *region]) for box in boxes)
            yield Block(param, (stop - start, shape[0], shape[1]), pieces)


def _piece(box: Bounds, wanted: Sequence[slice]) -> Piece:
    """What a rank with ``box`` of a parameter holds of the (strided) region ``wanted`` of it."""
    held, whole = [], []
    for (start, stop), want in zip(box, wanted, strict=True):
        first = max(0, -(-(start - want.start) // want.step))
        last = max(first, -(-(min(stop, want.stop) - want.start) // want.step))
        at = want.start + first * want.step - start
        held.append(slice(at, at + (last - first) * want.step, want.step) if last > first else slice(0, 0))
        whole.append(slice(first, last))
    shape = tuple(w.stop - w.start for w in whole)
    return Piece(tuple(held), tuple(whole), shape)


def matrix_shard_step(param: torch.Tensor) -> ShardStep | None:
    """The cut that goes through the parameter's matrices; None where the ones on a rank are whole.

    Raises:
        ValueError: if there are two.
    """
    cuts = [cut for cut in shard_steps(param) if cut.parts > 1 and cut.dim >= param.dim() - 2]
    if len(cuts) > 1:
        raise ValueError(f"Muon can't bring together matrices that two mesh axes cut: {[cut.axis for cut in cuts]}.")
    return cuts[0] if cuts else None
