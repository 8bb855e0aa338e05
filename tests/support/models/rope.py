"""Rotary embeddings whose frequencies depend on the length of a sequence, for any family."""

from dataclasses import replace
from typing import Any

from epfsdp2.engine.model.families import SCALED_BY_LENGTH
from tests.parity.family import Family

__all__ = ["PHI_SCALES", "longrope", "with_rope"]

PHI_SCALES = {"short_mscale": 1.1, "long_mscale": 1.4}


def longrope(width: int, original: int, **own: Any) -> dict[str, Any]:
    """Return parameters of longrope for heads of ``width``, whose long factors begin after ``original`` tokens."""
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(width // 2)],
        "long_factor": [2.0 + 0.3 * i for i in range(width // 2)],
        "original_max_position_embeddings": original,
        **own,
    }


def with_rope(family: Family, kind: str, original: int) -> Family | None:
    """Return a family whose rotary embeddings change after ``original`` tokens; None if it has none.

    Args:
        kind: ``longrope``, or any other of transformers'.
    """
    model = family.build(family.attention)
    own_config = type(model.config.get_text_config())
    rotary = [m for m in model.modules() if getattr(m, "rope_type", None) and type(m.config) is own_config]
    if not rotary:
        return None
    parameters = rotary[0].config.rope_parameters
    if isinstance(rotary[0].rope_type, dict):
        layers = [layer for layer in parameters if layer in rotary[0].rope_type]
        changed = {**parameters, **{layer: _changed(rotary[0], kind, original, layer) for layer in layers}}
    else:
        changed = _changed(rotary[0], kind, original)
    own = {"rope_parameters": changed, **({"max_position_embeddings": original} if kind == "dynamic" else {})}
    text = family.sizes.get("text_config")
    return replace(family, sizes={**family.sizes, **(own if text is None else {"text_config": {**text, **own}})})


def _changed(rotary: Any, kind: str, original: int, layer: str = "") -> dict[str, Any]:
    parameters = rotary.config.rope_parameters
    parameters = parameters[layer] if layer else parameters
    if parameters["rope_type"] == "proportional":  # Gemma 4's, of wider heads
        return dict(parameters)
    kept = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta")
    own = {key: parameters[key] for key in kept if key in parameters}
    width = 2 * getattr(rotary, f"{layer}_inv_freq" if layer else "inv_freq").numel()
    # As much as vLLM takes it to be, which does not read it.
    factor = rotary.config.max_position_embeddings / original if kind == "longrope" else 4.0
    both = {"factor": factor, "beta_fast": 32, "beta_slow": 1, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scales = PHI_SCALES if type(rotary).__name__ in SCALED_BY_LENGTH else {}
    return {**both, **longrope(width, original), **scales, **own, "rope_type": kind}
