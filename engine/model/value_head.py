"""The model of a critic: a head with one output in the place of the language-model head."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForTokenClassification, PretrainedConfig

from .meta import build_on_meta

__all__ = ["as_critic", "give_value_head", "has_value_class", "prepare_config", "value_fields", "value_head"]


def has_value_class(config: PretrainedConfig) -> bool:
    """Return whether transformers has a token-classification class of the family."""
    return type(config) in AutoModelForTokenClassification._model_mapping


def value_head(config: PretrainedConfig) -> str:
    """Return the name of the module that returns the values."""
    return "score" if has_value_class(config) else "lm_head"


def value_fields(model: Any) -> dict[str, Any]:
    """Return the fields of a ``config.json`` by which transformers loads a critic's weights.

    Empty for other models, and for a critic without a token-classification class.
    """
    if not hasattr(model, "score"):
        return {}
    name = AutoModelForTokenClassification._model_mapping[type(model.config)].__name__
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [name], "classifier_dropout": 0.0, **labels}


def prepare_config(config: Any) -> None:
    """Set what verl's own value engine sets: values are regressed, so nothing is dropped."""
    config.num_labels = 1
    config.classifier_dropout = 0.0
    config.hidden_dropout = 0.0
    if not has_value_class(config):
        config.tie_word_embeddings = False


def give_value_head(model: Any) -> None:
    """Replace the head of a causal LM by one with one output, for a family without a token-classification class."""
    head = model.get_output_embeddings()
    model.set_output_embeddings(nn.Linear(head.in_features, 1, bias=False, device="meta", dtype=head.weight.dtype))


def as_critic(model: Any) -> nn.Module:
    """Return a causal LM on the meta device as a critic's worker builds it; the model itself may be changed."""
    config = copy.deepcopy(model.config)
    prepare_config(config)
    if has_value_class(config):
        return build_on_meta(AutoModelForTokenClassification, config, torch.float32).to("meta")
    give_value_head(model)
    return model
