"""Sharded models with adapters, and plain models with the same adapters."""

import torch
import torch.distributed as dist

from epfsdp2.engine.lora.adapters import A, B, Lora, lora_of
from epfsdp2.engine.topology.dtensor import is_adapter
from tests.support.engine.lora import SCALING, adapters_of, lora_settings
from tests.support.engine.sharded import sharded_model, whole_tensors
from tests.support.models.tiny import VOCAB, reference_model

__all__ = [
    "CLIP",
    "WORLD",
    "logits_of",
    "merged_weights",
    "next_token_loss",
    "sharded_with_adapters",
    "weights_with_adapters",
]

WORLD = 4
CLIP = 0.5


def sharded_with_adapters(folder, ep, fsdp_size=-1, seed=0, changes=None, **options):
    """Build a sharded model with adapters in the engine's order."""
    model, meshes = sharded_model(
        folder,
        dist.get_world_size(),
        ep,
        fsdp_size,
        before=lambda model: Lora(model, lora_settings(**(changes or {}))),
        initialize=lambda name, tensor, fits: is_adapter(name),
        finish=lambda model: lora_of(model).initialize(model, seed),
        **options,
    )
    lora = lora_of(model)
    lora.freeze_base(model)
    return model.train(), meshes, lora


def merged_weights(weights, adapters):
    """Return the weights of a plain model with these adapters merged."""
    changed = dict(weights)
    for name in weights:
        if name + A in adapters:
            changed[name] = weights[name] + SCALING * adapters[name + B] @ adapters[name + A]
    return changed


def next_token_loss(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def logits_of(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def weights_with_adapters(folder, model):
    """Return the plain model's weights with the adapters of a sharded model merged, by plain arithmetic."""
    adapters = whole_tensors(adapters_of(model))
    return merged_weights({n: p.detach() for n, p in reference_model(folder).named_parameters()}, adapters)
