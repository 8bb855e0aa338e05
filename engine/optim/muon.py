"""Muon on sharded parameters: momentum stays sharded, and one rank orthogonalises each matrix.

Newton-Schulz needs a whole matrix, and with FSDP every rank has a slice of each. So the matrices of a bucket are
assigned to the ranks that share them, balanced by cost. One all-to-all sends the slices of a matrix to its owner, a
second one returns the slices of the result. Each rank sends and receives about as many bytes as it holds, twice; no
rank gathers everything. Expert weights whose experts are whole on a rank (``expert_shard_dim=0``, or ``ep_fsdp == 1``)
need no communication. Replicas (HSDP) hold equal gradients and do equal work.

The algorithm is Keller Jordan's (https://kellerjordan.github.io/posts/muon/), with the arguments, defaults and
arithmetic of ``torch.optim.Muon``. The one difference: by default the update has the RMS of AdamW's (Moonlight,
arXiv:2502.16982), so AdamW's learning rate and weight decay carry over.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..topology.dtensor import local_tensor
from .muon_partition import Block, Bucket, Layout, build_buckets, matrix_shard_step

__all__ = ["ADJUST_LR_FNS", "NS_DTYPES", "Muon", "newton_schulz"]

ADJUST_LR_FNS = ("match_rms_adamw", "original")
NS_DTYPES = {
    "auto": None,
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp32", "float32"), torch.float32),
}


class Muon(Optimizer):
    """Momentum, orthogonalised matrix by matrix, with decoupled weight decay.

    Args:
        params: 2-D weights and 3-D stacks of them, sharded or not, in groups with the fields of a ``Layout`` as options
            (see ``matrix_groups``). All ranks have to pass the same parameters in the same order, and to have gradients
            for the same parameters.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: see ``torch.optim.Muon``.
        adjust_lr_fn: ``"match_rms_adamw"`` scales the update of an ``(m, n)`` matrix by ``0.2 sqrt(max(m, n))``,
            ``"original"`` by ``sqrt(max(1, out / in))``.
        ns_dtype: dtype of Newton-Schulz and its all-to-alls: ``"fp32"``, ``"bf16"``, or ``"auto"`` for bfloat16 on an
            accelerator (as in ``torch.optim.Muon``) and float32 on a CPU.
        bucket_bytes: bytes of matrices that one rank orthogonalises at a time; at least one matrix. Two buckets are in
            memory at once, because one is sent while the other is computed.

    Raises:
        ValueError: an option is out of range, or the ``Layout`` of a group does not divide a parameter into matrices.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        *,
        ns_dtype: str = "auto",
        bucket_bytes: int = 64 << 20,
    ):
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
            if not value >= 0:
                raise ValueError(f"{name} has to be at least 0, not {value}.")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum has to be in [0, 1), not {momentum}.")
        if not 1 <= ns_steps < 100:
            raise ValueError(f"ns_steps has to be in [1, 100), not {ns_steps}.")
        if len(ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients are three numbers, not {ns_coefficients}.")
        if adjust_lr_fn not in ADJUST_LR_FNS:
            raise ValueError(f"adjust_lr_fn is one of {list(ADJUST_LR_FNS)}, not {adjust_lr_fn!r}.")
        if ns_dtype not in NS_DTYPES:
            raise ValueError(f"ns_dtype is one of {list(NS_DTYPES)}, not {ns_dtype!r}.")
        own = {"ns_coefficients": tuple(ns_coefficients), "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        common = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "eps": eps}
        defaults = {**common, **own, "ns_dtype": ns_dtype, "bucket_bytes": bucket_bytes, **vars(Layout())}
        self._bucket_cache: dict[tuple[int, ...], list[Bucket]] = {}
        super().__init__(params, defaults)
        for group in self.param_groups:
            for param in group["params"]:
                if param.dim() not in (2, 3) or param.shape[group["out_dim"]] % group["parts"]:
                    wrong = f"{tuple(param.shape)} can't be split into {group['parts']} parts."
                    raise ValueError(f"Muon takes matrices and stacks of them: {wrong}")
                matrix_shard_step(param)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; collective over the ranks that share a matrix."""
        exchanges = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._decay_and_accumulate(group, params)
                exchanges += [_BucketExchange(self, group, bucket) for bucket in self._buckets(group, params)]
        # The next bucket is sent while one is computed. All ranks of a group have the same buckets in the same order.
        under_way = None
        for exchange in exchanges:
            exchange.send()
            if under_way is not None:
                under_way.finish()
            under_way = exchange
        if under_way is not None:
            under_way.finish()

    def _decay_and_accumulate(self, group: dict[str, Any], params: Sequence[torch.Tensor]) -> None:
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momentum = [local_tensor(self.state[p]["momentum_buffer"]) for p in params]
        torch._foreach_lerp_(momentum, [_grad(p) for p in params], 1 - group["momentum"])
        torch._foreach_mul_([local_tensor(p) for p in params], 1 - float(group["lr"]) * group["weight_decay"])

    def _buckets(self, group: dict[str, Any], params: Sequence[torch.Tensor]) -> list[Bucket]:
        key = tuple(id(p) for p in params)
        if key not in self._bucket_cache:
            layout = Layout(group["parts"], group["out_dim"], group["interleaved"])
            self._bucket_cache[key] = build_buckets(params, layout, NS_DTYPES[group["ns_dtype"]], group["bucket_bytes"])
        return self._bucket_cache[key]


def newton_schulz(
    matrices: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Orthogonalise matrices ``(B, m, n)``, computed and returned in ``dtype``: bring their singular values near 1.

    ``coefficients`` are those of the quintic iteration (``torch/optim/_muon.py``).
    """
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(dtype)
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class _BucketExchange:
    """Sends a bucket's updates to their owners, and adds the orthogonalised updates to the parameters."""

    def __init__(self, optimizer: Muon, options: dict[str, Any], bucket: Bucket):
        self.optimizer, self.options, self.bucket = optimizer, options, bucket

    def send(self) -> None:
        """Start the all-to-all of this rank's pieces to their owners."""
        b, momentum = self.bucket, self.options["momentum"]
        self.to_owner = [sum(block.pieces[b.rank].numel for block in owned) for owned in b.blocks]
        self.from_rank = [sum(block.pieces[r].numel for block in b.blocks[b.rank]) for r in range(len(b.blocks))]
        self.mine = torch.empty(sum(self.to_owner), dtype=b.dtype, device=b.device)
        for block, view in self._my_views():
            held = block.pieces[b.rank].held
            update = _stack(self.optimizer.state[block.param]["momentum_buffer"])[held]
            if self.options["nesterov"]:
                update = torch.lerp(_stack(_grad(block.param))[held], update, momentum)
            view.copy_(update)
        self.owned = self.mine
        self.work = None
        if b.group is not None:
            self.owned = torch.empty(sum(self.from_rank), dtype=b.dtype, device=b.device)
            self.work = dist.all_to_all_single(
                self.owned, self.mine, self.from_rank, self.to_owner, group=b.group, async_op=True
            )

    def finish(self) -> None:
        """Orthogonalise this rank's matrices, send their pieces back, and update the parameters."""
        b, lr = self.bucket, float(self.options["lr"])
        if self.work is not None:
            self.work.wait()
        self._orthogonalize()
        if b.group is not None:
            dist.all_to_all_single(self.mine, self.owned, self.to_owner, self.from_rank, group=b.group)
        for block, view in self._my_views():
            param = _stack(block.param)[block.pieces[b.rank].held]
            param.add_(view.to(param.device), alpha=-lr * self._ratio(block))
        del self.mine, self.owned

    def _my_views(self) -> Iterator[tuple[Block, torch.Tensor]]:
        """Yield every block with the view of this rank's piece in the flat buffer, ordered by owner."""
        blocks = [block for owned in self.bucket.blocks for block in owned]
        pieces = [block.pieces[self.bucket.rank] for block in blocks]
        flat = self.mine.split([piece.numel for piece in pieces])
        for block, piece, part in zip(blocks, pieces, flat, strict=True):
            yield block, part.view(piece.shape)

    def _orthogonalize(self) -> None:
        """Orthogonalise the received matrices in place, one batch per shape."""
        owned = self.bucket.blocks[self.bucket.rank]
        by_shape: dict[tuple[int, int], list[int]] = {}
        for i, block in enumerate(owned):
            by_shape.setdefault(block.shape[1:], []).append(i)
        parts = self.owned.split([block.pieces[r].numel for r in range(len(self.from_rank)) for block in owned])
        o = self.options
        for shape, members in by_shape.items():
            counts = [owned[i].shape[0] for i in members]
            batch = self.owned.new_empty(sum(counts), *shape)
            places = [
                (whole[piece.whole], parts[r * len(owned) + i].view(piece.shape))
                for i, whole in zip(members, batch.split(counts), strict=True)
                for r, piece in enumerate(owned[i].pieces)
            ]
            for place, piece in places:
                place.copy_(piece)
            batch.copy_(newton_schulz(batch, o["ns_coefficients"], o["ns_steps"], o["eps"], batch.dtype))
            for place, piece in places:
                piece.copy_(place)

    def _ratio(self, block: Block) -> float:
        _, rows, cols = block.shape
        if self.options["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, cols))
        out, into = (rows, cols) if self.options["out_dim"] == -2 else (cols, rows)
        return math.sqrt(max(1, out / into))


def _grad(param: torch.Tensor) -> torch.Tensor:
    assert param.grad is not None, "buckets have no parameters without a gradient"
    return local_tensor(param.grad)


def _stack(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard as ``[e, rows, cols]``."""
    local = local_tensor(tensor)
    return local if local.dim() == 3 else local.unsqueeze(0)
