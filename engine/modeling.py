"""Build a Hugging Face model without its weights, and give it memory once it is sharded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

__all__ = ["build_on_meta", "materialize"]


def build_on_meta(
    auto_class: Any, config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False
) -> nn.Module:
    """Build the model with its parameters on the meta device and its buffers real.

    Buffers that are computed (rotary frequencies) are in no checkpoint, so they must not be lost on meta.

    Args:
        auto_class: a transformers auto class, e.g. ``AutoModelForCausalLM``.
        dtype: dtype of the parameters.
    """
    with _parameters_on_meta(), no_init_weights():
        return auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def materialize(model: nn.Module, device: torch.device | str, shards: torch.device | str | None = None) -> None:
    """Allocate this rank's shards, uninitialised, and move buffers to ``device``.

    Ties between parameters, which moving off the meta device breaks, are tied again.

    Args:
        shards: where the shards go; ``device`` by default, ``cpu`` under FSDP's CPU offload policy.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        return torch.empty_like(tensor, device=shards if isinstance(tensor, DTensor) and shards else device)

    model._apply(move)
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to meta as it is registered, so that at most one is ever allocated."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            kind = type(param)
            kwargs = {k: v for k, v in param.__dict__.items() if not k.startswith("_")}
            meta = kind(param.to("meta"), requires_grad=param.requires_grad)
            meta.__dict__.update(kwargs)
            module._parameters[name] = meta

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
