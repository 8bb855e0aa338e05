"""Rows of packed sequences: computed by sequence, as a row, and by ranks that share the row."""

import torch
import torch.distributed as dist
from torch import nn

from epfsdp2.engine.fsdp.activation_checkpoint import checkpoint_layers
from epfsdp2.engine.fsdp.ulysses import SequenceParallel
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.model.vision import VisionTowerSync
from epfsdp2.engine.packing.compressors import use_every_compressor
from epfsdp2.engine.packing.sequences import PackedSequences
from tests.parity.families import EVERY
from tests.support.models.tiny import VOCAB, relative_error

__all__ = [
    "IN_FLOAT64",
    "LENGTHS",
    "SIZES",
    "apart",
    "errors",
    "gradients",
    "loss",
    "one_by_one",
    "own_slice",
    "packed",
    "row",
    "shared",
]

# Windows, chosen keys and compressed keys within sequences.
SIZES = {
    "afmoe": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5},
    "deepseek_v4": {
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "compress_rates": {"heavily_compressed_attention": 4, "compressed_sparse_attention": 2},
        "index_topk": 2,
        "sliding_window": 5,
    },
    "gemma3": {"sliding_window": 5},
    "gemma4": {"sliding_window": 5},
    "glm_moe_dsa": {"index_topk": 4, "indexer_types": ["full", "shared", "full"]},
    "gpt_oss": {"sliding_window": 5},
    # Keys of a chunk; queries that are scaled by their place.
    "llama4": {"text_config": {**EVERY["llama4"].sizes["text_config"], "attention_chunk_size": 5}},
    "mistral": {"sliding_window": 5},
    "mixtral": {"sliding_window": 5},
    "openai_privacy_filter": {"sliding_window": 5},
}
# Families that need float64 everywhere for errors below 1e-6 (hyper-connections, sinks), or at all.
IN_FLOAT64 = (
    "bailing_hybrid",
    "deepseek_v4",
    "glm5_next",
    "hy_v4",
    "hy_v4_vl",
    "inkling",
    "inkling2",
    "inkling2_loop",
    "mistral_large4",
)
IN_FLOAT64 += ("openai_privacy_filter",)
LENGTHS = (11, 1, 14, 6)  # 32 tokens; slices of 2 and 4 ranks end within sequences


def row(lengths=LENGTHS):
    """Return the ids of each sequence, ``[1, n]``, and targets of the row, ``[S]``."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, VOCAB - 6, (1, length), generator=generator) for length in lengths]
    return ids, torch.randint(0, VOCAB, (sum(lengths),), generator=generator)


def loss(logits, targets):
    return nn.functional.cross_entropy(logits[0].double(), targets, reduction="sum")


def gradients(model, value):
    model.zero_grad()
    value.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def apart(model, ids):
    """Return the logits of sequences that are computed one by one."""
    return torch.cat([model(input_ids=each, use_cache=False).logits for each in ids], 1)


def packed(model, ids, own=slice(None)):
    """Return the logits of the row, or of a slice; a model with a vision tower always gets the whole row."""
    inputs = {
        "input_ids": torch.cat(ids, 1),
        "position_ids": torch.cat([torch.arange(each.shape[1]) for each in ids])[None],
        "attention_mask": None,
    }
    if hasattr(model.config, "vision_config"):
        VisionTowerSync(model).prepare_inputs(inputs)
    else:
        inputs["input_ids"] = inputs["input_ids"][:, own]
    return model(**inputs, use_cache=False).logits


def one_by_one(model, lengths=LENGTHS):
    """Return logits and gradients of the sequences of a row, each computed by itself."""
    ids, targets = row(lengths)
    logits = apart(model, ids)
    return logits.detach(), gradients(model, loss(logits, targets))


def own_slice(lengths, group):
    each = sum(lengths) // dist.get_world_size(group)
    return slice(dist.get_rank(group) * each, (dist.get_rank(group) + 1) * each)


def shared(model, group, lengths=LENGTHS, checkpointing="none", attach=lambda *_: None):
    """Return this rank's logits, the sum of all ranks' gradients, and the ``PackedSequences``.

    ``attach`` gets the model and the ``PackedSequences`` before the model is wrapped for recomputation.
    """
    (ids, targets), own, rows = row(lengths), own_slice(lengths, group), PackedSequences(model)
    SequenceParallel(model, group, rows)
    use_every_compressor(model)
    attach(model, rows)
    checkpoint_layers([model.get_submodule(fqn) for fqn in layer_names(model)], (), 8, checkpointing)
    logits = packed(model, ids, own)
    loss(logits, targets[own]).backward()
    # On every rank every parameter of a mixer has a gradient, or FSDP would hang. An indexer has none on any rank.
    mixers = rows._mixers.others.items()
    lack = [f"{fqn}.{n}" for fqn, module in mixers for n, p in module.named_parameters() if p.grad is None]
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, lack, group=group)
    assert all(each == lack for each in everyone) and all("index" in name for name in lack), everyone
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    for grad in grads.values():
        dist.all_reduce(grad, group=group)
    return logits.detach(), grads, rows


def errors(model, group, wanted, lengths=LENGTHS, **how):
    """Return the relative errors of logits and gradients of ranks that share a row; ``wanted`` is of ``one_by_one``."""
    logits, grads, _ = shared(model, group, lengths, **how)
    found = {f"gradient of {n}": relative_error(grads[n], grad) for n, grad in wanted[1].items()}
    return {"logits": relative_error(logits, wanted[0][:, own_slice(lengths, group)]), **found}
