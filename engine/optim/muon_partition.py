"""Find the matrices of a model's hidden layers in its parameters, and assign them to ranks for Muon.

A rank holds an index range of a parameter, and a matrix is a slice of the parameter, strided if parts are interleaved.
The assignment depends on sizes alone, so it is equal on all ranks.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..lora.targets import experts_of
from ..model.layers import layer_names, mtp_heads
from ..moe.find import is_interleaved
from ..topology.dtensor import is_adapter, shard_steps
from ..topology.index_ranges import IndexRange, ShardStep, shard_ranges

__all__ = ["Block", "Bucket", "Layout", "build_buckets", "matrix_groups", "matrix_shard_step", "muon_parameters"]

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout:
    """The matrices in a parameter ``[rows, cols]`` or ``[E, rows, cols]``.

    Args:
        parts: number of matrices along the output dim: 2 for gate and up in one weight.
        out_dim: the output dim, -2, or -1 where weights are stored transposed.
        interleaved: whether the parts are interleaved along the output dim (gpt-oss) rather than concatenated.
    """

    parts: int = 1
    out_dim: int = -2
    interleaved: bool = False


def muon_parameters(model: nn.Module) -> dict[str, Layout]:
    """Return the parameters that are matrices of hidden layers, by name, with their layouts.

    * Stacked expert weights ``[E, ..., ...]`` on transformers' experts interface: one matrix per expert, gate and up
      separately. The module's flags and its ``_apply_gate`` determine the layout.
    * 2-D weights of ``nn.Linear`` inside the model's layers. A fused projection (q, k and v in one) is one matrix.
    * The two matrices of each low-rank adapter of these, ``[r, in]`` and ``[out, r]``. The second has the rows of the
      weight, so gate and up are separate in it too.

    AdamW steps everything else:

    * embeddings and heads;
    * routers, because each of their rows scores one expert;
    * norms, biases (also stacked ones of experts), convolutions, parameters outside of linears;
    * linears with one output or one input;
    * experts of an ``engine.expert_plan``, because their layout isn't known.
    """
    found: dict[str, Layout] = {}
    experts = experts_of(model)
    for info in experts:
        module: Any = info.module
        out_dim = -1 if module.is_transposed else -2
        for name, param in module.named_parameters(recurse=False):
            if param.dim() == 3:
                gated = module.has_gate and name in ("gate_up_proj", "gate_up_proj_lora_B")
                outputs = -2 if is_adapter(name) else out_dim
                layout = Layout(2, outputs, is_interleaved(module)) if gated else Layout(1, outputs)
                found[f"{info.fqn}.{name}"] = layout
    layers = tuple(f"{name}." for name in layer_names(model))
    others = _routers(model, {info.fqn: info.num_experts for info in experts} | _planned_experts(model))
    others |= {model.get_submodule(head) for head in mtp_heads(model)}
    for fqn, module in model.named_modules():
        linear = isinstance(module, nn.Linear) and fqn.startswith(layers) and module not in others
        for name, param in module.named_parameters(recurse=False) if linear else ():
            if name.startswith("weight") and param.dim() == 2 and min(param.shape) > 1:
                found[f"{fqn}.{name}"] = Layout()
    # In the model's order, without frozen parameters and without those tied to a parameter outside the layers.
    return {name: found[name] for name, p in model.named_parameters() if name in found and p.requires_grad}


def matrix_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups for ``Muon``, one per layout that occurs in the model."""
    groups: dict[Layout, list[nn.Parameter]] = {}
    params = dict(model.named_parameters())
    for name, layout in muon_parameters(model).items():
        groups.setdefault(layout, []).append(params[name])
    return [{"params": members, **vars(layout)} for layout, members in groups.items()]


def _planned_experts(model: nn.Module) -> dict[str, int]:
    """Map modules whose parameters are sharded over ``ep`` (``engine.expert_plan``) to their number of experts."""
    found = {}
    for name, param in model.named_parameters():
        for step in shard_steps(param):
            if step.axis == "ep":
                found[name.rpartition(".")[0]] = param.shape[step.dim]
    return found


def _routers(model: nn.Module, experts: Mapping[str, int]) -> set[nn.Module]:
    """Return the routers: classes that transformers records as such, and linears beside experts, an output per expert.

    ``experts`` maps the name of a module of experts to their number.
    """
    classes: list[type] = []
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
        for entry in recorded if isinstance(recorded, (list, tuple)) else [recorded]:
            target = getattr(entry, "target_class", entry)
            # jamba records nn.Linear itself; the loop over blocks below finds its routers.
            if isinstance(target, type) and not issubclass(nn.Linear, target):
                classes.append(target)
    tops = [m for m in model.modules() if isinstance(m, tuple(classes))]
    routers = {m for top in tops for m in top.modules()}
    for fqn, count in experts.items():
        block = model.get_submodule(fqn.rpartition(".")[0])
        routers |= {m for m in block.modules() if isinstance(m, nn.Linear) and m.out_features == count}
    return routers


@dataclass(frozen=True)
class _Piece:
    """The part of a block that one rank holds: its slices in the rank's shard ``[e, rows, cols]`` and in the block."""

    held: tuple[slice, ...]
    whole: tuple[slice, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Block:
    """Matrices that one rank orthogonalises: one part of consecutive experts of one parameter.

    Args:
        shape: number of matrices, and the rows and columns of each.
        pieces: by rank of the group.
    """

    param: torch.Tensor
    shape: tuple[int, int, int]
    pieces: tuple[_Piece, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def cost(self) -> int:
        count, rows, cols = self.shape
        short, long = sorted((rows, cols))
        # FLOPs per iteration: two products with the matrix, and the square of its Gram matrix.
        return count * short * short * (2 * long + short)


@dataclass(frozen=True)
class Bucket:
    """The blocks that one pair of all-to-alls sends, by their owner, a rank of the group.

    ``group`` is None if the matrices are whole on this rank.
    """

    blocks: tuple[tuple[Block, ...], ...]
    group: dist.ProcessGroup | None
    rank: int
    device: torch.device
    dtype: torch.dtype


def build_buckets(
    params: Sequence[torch.Tensor], layout: Layout, ns_dtype: torch.dtype | None, bucket_bytes: int
) -> list[Bucket]:
    """Assign the matrices of ``params`` to buckets of ``bucket_bytes`` per rank, and to owners; equal on all ranks.

    ``ns_dtype`` is the dtype of Newton-Schulz, None for the default of the device.
    """
    sharers: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for param in params:
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        sharers.setdefault((mesh, matrix_shard_step(param)), []).append(param)
    buckets: list[Bucket] = []
    for (mesh, step), members in sharers.items():
        # With CPU offload, matrices are still sent and orthogonalised on the mesh's device.
        device = torch.empty(0, device=mesh.device_type if mesh else members[0].device).device
        dtype = ns_dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        ranks = step.parts if step else 1
        rank, group = (mesh.get_local_rank(step.axis), mesh.get_group(step.axis)) if step else (0, None)
        blocks = [b for p in members for b in _blocks(p, step, layout, bucket_bytes // dtype.itemsize)]
        total = [0] * ranks
        for filled in _split_into_buckets(blocks, ranks * bucket_bytes // dtype.itemsize, ranks):
            buckets.append(Bucket(_assign_to_ranks(filled, total), group, rank, device, dtype))
    return buckets


def _split_into_buckets(blocks: Sequence[Block], limit: int, ranks: int) -> Iterator[list[Block]]:
    """Yield lists of consecutive blocks with at most ``limit`` elements, or with one large block per rank.

    There may be no blocks: if more ranks than experts share dim 0, some ranks hold no expert.
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
    """Assign blocks to owners, the most expensive first.

    Each goes to the rank with the least cost in this bucket, then in all buckets so far (``total``).
    """
    owned: list[list[Block]] = [[] for _ in total]
    load = [0] * len(total)
    for block in sorted(blocks, key=lambda b: -b.cost):
        owner = min(range(len(total)), key=lambda rank: (load[rank], total[rank]))
        owned[owner].append(block)
        load[owner] += block.cost
        total[owner] += block.cost
    return tuple(map(tuple, owned))


def _blocks(param: Any, step: ShardStep | None, layout: Layout, limit: int) -> Iterator[Block]:
    """Yield the blocks of a parameter: enough for every rank to get some, each of at most ``limit`` elements."""
    steps = shard_steps(param)
    at = tuple((s.axis, param.device_mesh.get_local_rank(s.axis)) for s in steps)
    for shape, pieces in _shapes_and_pieces(tuple(param.shape), steps, at, step, layout, limit):
        yield Block(param, shape, pieces)


# Cached, because layers repeat the shapes, and each shape has a piece for every rank.
@functools.lru_cache(maxsize=256)
def _shapes_and_pieces(
    shape: tuple[int, ...],
    steps: tuple[ShardStep, ...],
    at: tuple[tuple[str, int], ...],
    step: ShardStep | None,
    layout: Layout,
    limit: int,
) -> tuple[tuple[tuple[int, int, int], tuple[_Piece, ...]], ...]:
    """Return shape and pieces of each block of a parameter.

    ``step`` is the one of ``steps`` that shards the matrices. ``at`` is this rank's index on each axis.
    """
    ranks, found = step.parts if step else 1, []
    held = [shard_ranges(shape, steps, {**dict(at), **({step.axis: rank} if step else {})}) for rank in range(ranks)]
    first, last = _bounds(held[0][0])[0]
    sizes = list(shape[-2:])
    out_dim = layout.out_dim + 2
    for part in range(layout.parts):
        each = sizes[out_dim] // layout.parts
        matrix_slices = [slice(0, size, 1) for size in sizes]
        if layout.interleaved:
            matrix_slices[out_dim] = slice(part, sizes[out_dim], layout.parts)
        else:
            matrix_slices[out_dim] = slice(part * each, (part + 1) * each, 1)
        # If gate and up are sharded separately, a rank's shard is a piece of gate and then a piece of up.
        index = part if len(held[0]) > 1 else 0
        bounds = [_bounds(ranges[index]) for ranges in held]
        before = [sum(own.shape[layout.out_dim] for own in ranges[:index]) for ranges in held]
        rows, cols = (len(range(s.start, s.stop, s.step)) for s in matrix_slices)
        count = max(1, min(-(-(last - first) // ranks), limit // (rows * cols)))
        for start in range(first, last, count):
            stop = min(start + count, last)
            wanted = [slice(start, stop, 1), *matrix_slices]
            pieces = tuple(
                _piece(own, wanted, skipped, out_dim + 1) for own, skipped in zip(bounds, before, strict=True)
            )
            found.append(((stop - start, rows, cols), pieces))
    return tuple(found)


def _bounds(held: IndexRange) -> Bounds:
    """Return the bounds of a range in each dim; a single matrix is a stack of one."""
    own = tuple(zip(held.low, held.high, strict=True))
    return ((0, 1), *own) if len(own) == 2 else own


def _piece(bounds: Bounds, wanted: Sequence[slice], before: int, out_dim: int) -> _Piece:
    """Return the piece of the (strided) slices ``wanted`` of a parameter that a rank with ``bounds`` holds.

    The values within ``bounds`` begin at ``before`` along ``out_dim`` of the rank's shard.
    """
    held, whole = [], []
    for dim, ((start, stop), want) in enumerate(zip(bounds, wanted, strict=True)):
        first = max(0, -(-(start - want.start) // want.step))
        last = max(first, -(-(min(stop, want.stop) - want.start) // want.step))
        at = want.start + first * want.step - start + (before if dim == out_dim else 0)
        held.append(slice(at, at + (last - first) * want.step, want.step) if last > first else slice(0, 0))
        whole.append(slice(first, last))
    shape = tuple(w.stop - w.start for w in whole)
    return _Piece(tuple(held), tuple(whole), shape)


def matrix_shard_step(param: torch.Tensor) -> ShardStep | None:
    """Return the step that shards the parameter's matrices, None if they are whole; ``ValueError`` if two do."""
    steps = [step for step in shard_steps(param) if step.parts > 1 and step.dim >= param.dim() - 2]
    if len(steps) > 1:
        raise ValueError(f"Muon can't gather matrices that are sharded over two axes: {[s.axis for s in steps]}.")
    return steps[0] if steps else None
