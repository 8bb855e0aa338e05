"""The config that a run builds its model with: a checkpoint's, without the values that would override the run's own."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig

__all__ = ["config_parts", "for_run"]

# Values with which a forward returns something else than verl reads, keeps more than it needs, or recomputes layers a
# second time. Some published configs have them, as they were saved by a training script.
_OF_THE_RUN = {
    "gradient_checkpointing": False,  # engine.activation_checkpointing
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,  # engine.router_aux_loss_coef
    "return_dict": True,
    "use_cache": False,
}


def for_run(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """Return a copy of a config that leaves dtype and outputs to the run, in nested configs too.

    The copy is for building a model; a checkpoint is saved with the config itself. Without ``dtype`` a class for token
    classification, or a tower, builds its layers in the dtype of ``config.json``, and FSDP needs one dtype.
    """
    own = copy.deepcopy(config)
    for part in config_parts(own):
        part.dtype = dtype
        for name, value in _OF_THE_RUN.items():
            if hasattr(part, name):
                setattr(part, name, value)
    return own


def config_parts(config: PretrainedConfig) -> Iterator[Any]:
    """Yield a config and those nested in it, at any depth."""
    yield config
    for name in config.sub_configs:
        nested = getattr(config, name, None)
        if nested is not None:
            yield from config_parts(nested)
