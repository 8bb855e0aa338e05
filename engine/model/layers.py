"""Find the layers of a Hugging Face model."""

from torch import nn

__all__ = ["layer_names"]


def layer_names(model: nn.Module) -> list[str]:
    """Return the FQNs of the model's layers, in order: the innermost modules of a class in ``_no_split_modules``."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    # fully_shard makes each module an instance of a subclass of its own class.
    named = [fqn for fqn, m in model.named_modules() if classes & {c.__name__ for c in type(m).__mro__}]
    return [fqn for fqn in named if not any(other.startswith(fqn + ".") for other in named)]
