"""Rotary embeddings whose frequencies depend on the length of a sequence, for any family."""

from dataclasses import replace
from typing import Any

from tests.parity.family import Family

__all__ = ["DYNAMIC", "longrope", "with_rope"]

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


def longrope(width: int, original: int, **own: Any) -> dict[str, Any]:
    """Return parameters of longrope for heads of ``width``, whose long factors begin after ``original`` tokens."""
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(width // 2)],
        "long_factor": [2.0 + 0.3 * i for i in range(width // 2)],
        "original_max_position_embeddings": original,
        "short_mscale": 1.1,  # Phi-3.5-MoE's
        "long_mscale": 1.4,
        **own,
    }


def with_rope(family: Family, kind: str, original: int) -> Family | None:
    """Return a family whose rotary embeddings change after ``original`` tokens; None if it has none.

    Args:
        kind: ``longrope``, or any other of transformers'.
    """
    rotary = [m for m in family.build(family.attention).modules() if getattr(m, "rope_type", None)]
    parameters = getattr(rotary[0].config, "rope_parameters", None) if rotary else None
    if not parameters:
        return None
    if isinstance(rotary[0].rope_type, dict):
        changed = {layer: _changed(rotary[0], kind, original, layer) for layer in parameters}
    else:
        changed = _changed(rotary[0], kind, original)
    own = {"rope_parameters": changed, **({"max_position_embeddings": original} if kind == "dynamic" else {})}
    text = family.sizes.get("text_config")
    return replace(family, sizes={**family.sizes, **(own if text is None else {"text_config": {**text, **own}})})


def _changed(rotary: Any, kind: str, original: int, layer: str | None = None) -> dict[str, Any]:
    name, parameters = (
        ("inv_freq", rotary.config.rope_parameters)
        if layer is None
        else (
            f"{layer}_inv_freq",
            rotary.config.rope_parameters[layer],
        )
    )
    if parameters.get("rope_type") == "proportional":  # Gemma 4's, of wider heads
        return dict(parameters)
    kept = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta")
    own = {key: parameters[key] for key in kept if key in parameters}
    width = 2 * getattr(rotary, name).numel()
    both = {"factor": 4.0, "beta_fast": 32, "beta_slow": 1, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {**both, **longrope(width, original), **own, "rope_type": kind}
