"""Keep vision towers in step: in a micro-batch either all ranks run the tower or none does.

The tower is sharded too, so its forward and backward are collectives, and a rank whose samples have no image has to
take part. It runs the tower on the smallest image possible and adds the output times zero to the input embeddings.
They stay unchanged, and the tower's gradient on this rank is zero. Once per optimizer step the ranks agree whether any
of them has images. If none has, no tower runs and its parameters have no gradient, as in one process.

Nothing here depends on a family. It needs the method ``get_image_features``, which every transformers model with images
has. Images are rows of patches with a grid (``pixel_values [patches, C]``, ``image_grid_thw``). Gemma 4 pads them and
gives each patch its place (``pixel_values [images, patches, C]``, ``image_position_ids``). Videos have grids.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ..compat.versions import is_older
from ..errors import SettingError
from .families import IMAGES_IN_FUSED_KERNELS, IMAGES_UNSUPPORTED, ONE_TOKEN_FOR_BOTH
from .layers import layer_names

__all__ = ["VisionTowerSync", "images_error", "preserve_forward", "tower_parameters", "why_not_images"]

# Pixels, their grid, and the method that computes their features.
_KINDS = {
    "pixel_values": ("image_grid_thw", "get_image_features"),
    "pixel_values_videos": ("video_grid_thw", "get_video_features"),
}
_PLACES = "image_position_ids"
_FEATURES = {"image_hidden_states", "image_outputs", "video_outputs"}  # in a model's output


def why_not_images(model: Any, batch_invariant: bool = False, use_fused_kernels: bool = False) -> str | None:
    """Return why a model can't be trained on images; None if it can."""
    if not hasattr(model.config, "vision_config") or not hasattr(model, "get_image_features"):
        return "it has no vision tower"
    if not {"image_grid_thw", _PLACES} & signature(model.get_image_features).parameters.keys():
        return f"its images are not patches with a grid (image_grid_thw) or with places ({_PLACES})"
    if _sees_ahead(model) and is_older("transformers", "5.13"):
        return "before transformers 5.13 tokens of one image see each other in the wrong layers"
    if _sees_ahead(model) and "flash" in (model.config.get_text_config()._attn_implementation or ""):
        return "tokens of one image see each other, which needs attn_implementation=sdpa"
    if batch_invariant:
        return "its tower computes the images of a micro-batch together, which engine.batch_invariant=True rules out"
    if use_fused_kernels and model.config.model_type not in IMAGES_IN_FUSED_KERNELS:
        return "verl's fused kernels would leave them out, so it needs model.use_fused_kernels=False"
    return IMAGES_UNSUPPORTED.get(model.config.model_type)


def _sees_ahead(model: Any) -> bool:
    """Whether tokens of one image see each other."""
    return getattr(model.config.get_text_config(), "use_bidirectional_attention", None) == "vision"


def images_error(name: str, why: str) -> SettingError:
    """Build the error for a model that gets images but can't be trained on them."""
    rule = f"{name} can't be trained on images: {why}."
    works = "data without images, or Qwen3-VL-MoE, Qwen3.5-MoE, GLM-4.5V or Gemma 4"
    return SettingError("data.train_files", "data with images", rule, works)


def tower_parameters(model: Any) -> set[str]:
    """Return the names of a vision tower's parameters, its merger's included; of a model without one, none."""
    config = getattr(model.config, "vision_config", None)
    if config is None:
        return set()
    towers = [fqn for fqn, part in model.named_modules() if type(getattr(part, "config", None)) is type(config)]
    return {name for name, _ in model.named_parameters() if any(name.startswith(f"{fqn}.") for fqn in towers)}


class VisionTowerSync:
    """Keeps the vision towers of a transformers model, sharded or not yet, in step over all ranks."""

    def __init__(self, model: Any, batch_invariant: bool = False, use_fused_kernels: bool = False):
        self._model = model
        self._refused = why_not_images(model, batch_invariant, use_fused_kernels)
        self._rows = any(hasattr(part, "get_rope_index") for part in (model, model.base_model))
        features = getattr(model, "get_image_features", None)
        self._has_places = features is not None and _PLACES in signature(features).parameters
        self._widths = dict.fromkeys(_KINDS, 0)  # of a row of patches, by kind; 0 if no rank has any in this batch
        self._missing: list[str] = []  # kinds that this micro-batch lacks and another rank may have
        # Runs after FSDP's own hooks, and before the model computes its images.
        model.get_input_embeddings().register_forward_hook(self._add_dummy_features)
        model.base_model.register_forward_hook(_drop_features)

    def sync_modalities(self, samples: Iterable[Any], device: Any) -> None:
        """Find out which kinds of pixels the ranks' batches hold; collective.

        Args:
            samples: verl's ``multi_modal_inputs`` of each sample: a mapping or None, possibly wrapped by tensordict.

        Raises:
            SettingError: on all ranks, if a sample has images, videos or audio that the model can't be trained on.
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
        if widths[1] and self._has_places:
            rule = f"{name} can't be trained on videos by this engine."
            raise SettingError("data.train_files", "data with videos", rule, "data with images")
        if all(widths) and self._model.config.model_type in ONE_TOKEN_FOR_BOTH:
            rule = f"{name} can't have images and videos in one batch: their tokens are the same in transformers."
            raise SettingError("data.train_files", "data with images and videos", rule, "data with one of them")
        if other:
            rule = f"{name} can't be trained on audio by this engine."
            raise SettingError("data.train_files", "data with audio", rule, "data without it")
        self._widths = dict(zip(_KINDS, widths, strict=True))

    def prepare_inputs(self, inputs: dict[str, Any]) -> None:
        """Prepare the arguments of one micro-batch's forward, in place.

        Position ids ``(1, T)`` become ``(4, 1, T)`` if the model has several rows of positions, because some models
        separate packed sequences only by the first of four.
        """
        self._missing = [kind for kind, width in self._widths.items() if width and inputs.get(kind) is None]
        inputs.pop("images_seqlens", None)  # verl counts FLOPs by it
        inputs.pop("mm_token_type_ids", None)  # verl's are of sequences, and not of the row
        if self._has_places and _sees_ahead(self._model):
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == self._model.config.image_token_id).int()
        positions = inputs.get("position_ids")
        if self._rows and positions is not None and positions.dim() == 2 and inputs.get("attention_mask") is None:
            inputs["position_ids"] = positions.expand(4, *positions.shape)

    def _add_dummy_features(self, module: nn.Module, args: tuple[Any, ...], embeddings: torch.Tensor) -> torch.Tensor:
        for kind in self._missing:
            for features in self._dummy_features(kind, embeddings.device):
                embeddings = embeddings + 0.0 * features.mean().to(embeddings.dtype)
        return embeddings

    def _dummy_features(self, kind: str, device: torch.device) -> list[torch.Tensor]:
        """Return the features of one black image of one token: everything that the model would add to the text."""
        grid_name, method = _KINDS[kind]
        vision = self._model.config.vision_config
        side = vision.pooling_kernel_size if self._has_places else vision.spatial_merge_size
        pixels = torch.zeros(side * side, self._widths[kind], device=device)
        if self._has_places:
            place = torch.arange(side, device=device)
            pixels, where = pixels[None], {_PLACES: torch.cartesian_prod(place, place)[None]}
        else:
            where = {grid_name: torch.tensor([[1, side, side]], device=device)}
        computed = getattr(self._model, method)(pixels, **where, return_dict=True)
        features = tree_leaves((computed.pooler_output, getattr(computed, "deepstack_features", None)))
        return [each for each in features if isinstance(each, torch.Tensor)]


def _drop_features(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Drop the features of images from an output: their gradient would start FSDP's prefetch on ranks with images."""
    for name in _FEATURES & output.keys():
        setattr(output, name, None)


@contextmanager
def preserve_forward(model: Any) -> Iterator[None]:
    """Restore the forwards of the base class and of the layers' classes after the block, which may patch them.

    verl's ``apply_monkey_patch`` replaces the base's for some families. It would run the tower whenever a micro-batch
    has no image. That is too often if no rank has any, and only once if another rank has images and videos. Its layers
    of Qwen3.5 read a name that transformers 5.19 has no more.
    """
    layers = (module for fqn in layer_names(model) for module in model.get_submodule(fqn).modules())
    kinds: Iterable[Any] = map(type, (model.base_model, *layers))
    own = {kind: kind.forward for kind in kinds if "forward" in vars(kind)}
    try:
        yield
    finally:
        for kind, forward in own.items():
            kind.forward = forward


def _unwrapped(sample: Any) -> Mapping[str, Any] | None:
    """Unwrap a value that tensordict has wrapped because it is no tensor."""
    return sample if sample is None or isinstance(sample, Mapping) else sample.data
