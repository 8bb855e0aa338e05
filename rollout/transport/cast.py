"""A tensor that is cast while it is copied, in one pass over memory instead of two."""

from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["CastOnCopy"]


class CastOnCopy(torch.Tensor):
    """Stands for ``values.to(dtype)``: ``copy_`` from it casts and copies at once, any other operation casts first.

    Args:
        values: dense, without a gradient; read when this tensor is used, not when it is made.
    """

    stored: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: torch.Tensor, dtype: torch.dtype) -> "CastOnCopy":
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, dtype=dtype, device=values.device
        )

    def __init__(self, values: torch.Tensor, dtype: torch.dtype):
        self.stored = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], cls):
            return func(args[0], args[1].stored, *args[2:])
        if func is torch.ops.aten.detach.default:
            return cls(args[0].stored, args[0].dtype)
        args, kwargs = tree_map(_materialized, (args, kwargs or {}))
        return func(*args, **kwargs)


def _materialized(value: Any) -> Any:
    return value.stored.to(value.dtype) if isinstance(value, CastOnCopy) else value
