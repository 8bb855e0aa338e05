"""Vision towers in step: all ranks run one in a micro-batch, or none does.

A tower is sharded like everything else, so its forward and backward are collectives, and a rank whose samples have no
image has to take part. Its tower then runs on the smallest image there is, and what comes out is added to the input
embeddings times zero: the embeddings are as before, and the tower's gradient on this rank is zero. Whether any rank has
images is agreed on once for a batch, that is for a step of the optimizer: where none has, no tower runs, and its
parameters have no gradient, as in one process.

Nothing here is of one family. A family takes part whose images are rows of patches with a grid (``pixel_values``,
``image_grid_thw``) and that computes their features in ``get_image_features``, which transformers asks of every model
with images; the same for videos.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import SettingError

__all__ = ["VisionTowerSync", "images_error", "preserve_forward", "why_not_images"]

# Pixels, their grid, and the method that computes their features.
_KINDS = {
    "pixel_values": ("image_grid_thw", "get_image_features"),
    "pixel_values_videos": ("video_grid_thw", "get_video_features"),
}
# Families whose images would be computed by other weights than in transformers, and why.
_UNSUPPORTED = {
    "ernie4_5_vl_moe": "its experts for vision are chosen by moe_mm_token_type_ids, which verl's batches don't have",
    "qwen3_omni_moe_thinker": "verl 0.9.1 has no processor for it, so its positions are not known",
}


def why_not_images(model: Any) -> str | None:
    """Why a model can't be trained on images here; None if it can."""
    if not hasattr(model.config, "vision_config") or not hasattr(model, "get_image_features"):
        return "it has no vision tower"
    if "image_grid_thw" not in signature(model.get_image_features).parameters:
        return "its images are not rows of patches with a grid (pixel_values and image_grid_thw)"
    return _UNSUPPORTED.get(model.config.model_type)


def images_error(name: str, why: str) -> SettingError:
    """What is said where a model is given images that it can't be trained on."""
    rule = f"{name} can't be trained on images: {why}."
    return SettingError(
        "data.train_files", "data with images", rule, "data without images, or Qwen3-VL-MoE or GLM-4.5V"
    )


class VisionTowerSync:
    """The vision towers of one model.

    Args:
        model: a transformers model, before or after it is sharded.
    """

    def __init__(self, model: Any):
        self._model = model
        self._refused = why_not_images(model)
        self._rows = any(hasattr(part, "get_rope_index") for part in (model, model.base_model))
        self._widths = dict.fromkeys(_KINDS, 0)  # of a row of patches, by kind; 0 where no rank of this batch has any
        self._missing: list[str] = []  # kinds that this micro-batch lacks and another rank may have
        # After FSDP's own hooks, and before the model looks at its images.
        model.get_input_embeddings().register_forward_hook(self._add_dummy_features)

    def sync_modalities(self, samples: Iterable[Any], device: Any) -> None:
        """Find out which kinds of pixels the ranks' batches hold; collective.

        Args:
            samples: of each sample what verl calls its ``multi_modal_inputs``: a mapping or none, maybe wrapped.
            device: where the default group's backend takes tensors from.

        Raises:
            SettingError: on all ranks alike, if a sample has what the model can't be trained on here.
        """
        own = [sample for sample in map(_unwrapped, samples) if sample]
        widths = [max((s[kind].shape[-1] for s in own if s.get(kind) is not None), default=0) for kind in _KINDS]
        other = any(s.get("input_features") is not None for s in own)
        agreed = torch.tensor([*widths, int(other)], device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        *widths, other = agreed.tolist()
        name = type(self._model).__name__
        if any(widths) and self._refused is not None:
            raise images_error(name, self._refused)
        if other:
            rule = f"{name} can't be trained on audio by this engine."
            raise SettingError("data.train_files", "data with audio", rule, "data without it")
        self._widths = dict(zip(_KINDS, widths, strict=True))

    def prepare_inputs(self, inputs: dict[str, Any]) -> None:
        """Prepare for the forward of one micro-batch.

        Args:
            inputs: the arguments of the model's forward. Position ids ``(1, T)`` become ``(4, 1, T)`` where images have
                rows of positions: such models may keep packed sequences apart by the first of four rows alone.
        """
        self._missing = [kind for kind, width in self._widths.items() if width and inputs.get(kind) is None]
        inputs.pop("images_seqlens", None)  # verl counts FLOPs by it
        positions = inputs.get("position_ids")
        if self._rows and positions is not None and positions.dim() == 2 and inputs.get("attention_mask") is None:
            inputs["position_ids"] = positions.expand(4, *positions.shape)

    def _add_dummy_features(self, module: nn.Module, args: tuple[Any, ...], embeddings: torch.Tensor) -> torch.Tensor:
        for kind in self._missing:
            for features in self._dummy_features(kind, embeddings.device):
                embeddings = embeddings + 0.0 * features.mean().to(embeddings.dtype)
        return embeddings

    def _dummy_features(self, kind: str, device: torch.device) -> Iterator[torch.Tensor]:
        """What the model computes of one black image with one token: all that it would put into the text."""
        grid_name, method = _KINDS[kind]
        merge = self._model.config.vision_config.spatial_merge_size
        pixels = torch.zeros(merge * merge, self._widths[kind], device=device)
        grid = torch.tensor([[1, merge, merge]], device=device)
        computed = getattr(self._model, method)(pixels, **{grid_name: grid}, return_dict=True)
        yield from _tensors(computed.pooler_output)
        yield from _tensors(getattr(computed, "deepstack_features", None))


@contextmanager
def preserve_forward(model: Any) -> Iterator[None]:
    """Have the model that sees the images compute as in transformers, whatever is patched inside.

    verl's ``apply_monkey_patch`` gives some families a forward that runs the tower wherever a micro-batch has no image:
    too often where no rank has any, and once where another rank has images and videos.
    """
    kind = type(model.base_model)
    own = kind.forward
    try:
        yield
    finally:
        kind.forward = own


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif found is not None:
        for each in found:
            yield from _tensors(each)


def _unwrapped(sample: Any) -> Mapping[str, Any] | None:
    """tensordict wraps what is no tensor."""
    return sample if sample is None or isinstance(sample, Mapping) else sample.data
