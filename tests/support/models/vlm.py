"""Tiny models that see images, and samples of which some have images."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from epfsdp2.engine.compat.versions import fault_of_family
from epfsdp2.engine.model.families import ONE_TOKEN_FOR_BOTH
from tests.parity.families import FAMILIES
from tests.support.models.tiny import VOCAB, save_random
from tests.support.trainer.ppo import PROMPT, RESPONSE, SAMPLES, Sample, ppo_batch, ppo_samples

__all__ = [
    "IMAGE_TOKENS",
    "VLMS",
    "VlmSample",
    "plain_vlm",
    "processor_config",
    "save_processor",
    "save_vlm",
    "vlm_batch",
    "vlm_config",
    "vlm_logits",
    "vlm_samples",
]

_START, _END, _IMAGE, _VIDEO = 92, 93, 94, 95
IMAGE_TOKENS = {
    "image_token_id": _IMAGE,
    "video_token_id": _VIDEO,
    "vision_start_token_id": _START,
    "vision_end_token_id": _END,
    "image_start_token_id": _START,
    "image_end_token_id": _END,
}
_GRIDS = ((1, 4, 4), (1, 2, 6), (1, 2, 2))  # in patches; 2 x 2 of them are a token
_MOST = 16  # patches of an image
_LONGEST = 2 * (4 + 2)  # tokens of two images


def _text(**own: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 40,
        "moe_intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
        **own,
    }


_VISION = {"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 48}
_PATCHES = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
_DEEP = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_expert_intermediate_size": 20,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}

# Class in transformers (without ForConditionalGeneration), and arguments of its config.
VLMS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {"text_config": _text(num_experts=8), "vision_config": {**_VISION, **_PATCHES, **_DEEP}},
    ),
    "qwen3_vl": ("Qwen3VL", {"text_config": _text(), "vision_config": {**_VISION, **_PATCHES, **_DEEP}}),
    "glm4v_moe": (
        "Glm4vMoe",
        {
            "text_config": _text(
                n_routed_experts=8,
                n_shared_experts=1,
                first_k_dense_replace=1,
                n_group=2,
                topk_group=1,
                # A key's bias hardly changes attention, so most of its gradient is rounding errors.
                attention_bias=False,
                rope_parameters=_MROPE,
            ),
            "vision_config": {**_VISION, **_PATCHES, "image_size": 16},
        },
    ),
    **{
        name: (
            kind,
            {
                "text_config": _text(**experts, **_LINEAR, rope_parameters=_MROPE),
                "vision_config": {**_VISION, **_PATCHES, "num_position_embeddings": 16},
            },
        )
        for name, kind, experts in (("qwen3_5_moe", "Qwen3_5Moe", {"num_experts": 8}), ("qwen3_5", "Qwen3_5", {}))
    },
    "gemma4": (
        "Gemma4",
        {
            "text_config": {
                **FAMILIES["gemma4"].sizes,
                "use_bidirectional_attention": "vision",
                "tie_word_embeddings": False,
            },
            "vision_config": {
                **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
                **{"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2},
                "position_embedding_size": 16,
            },
        },
    ),
}


def save_vlm(name: str, folder: Path, seed: int = 0) -> Path:
    """Save the family's model, every weight random."""
    if fault := fault_of_family(name):
        pytest.skip(fault.reason)
    kind = getattr(transformers, f"{VLMS[name][0]}ForConditionalGeneration")
    return save_random(kind(vlm_config(name)), folder, seed)


def vlm_config(name: str) -> Any:
    """The family's config, of tiny sizes."""
    kind, sizes = VLMS[name]
    return getattr(transformers, f"{kind}Config")(**sizes, **IMAGE_TOKENS, tie_word_embeddings=False)


def plain_vlm(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """The plain Hugging Face model, its experts computed by its own loop; in float32, within ``float64()`` float64."""
    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype or torch.float32, experts_implementation="eager", attn_implementation="sdpa"
    )


def save_processor(folder: Path, vocab_size: int, patch_size: int) -> None:
    """Beside a model, what turns words ``t0 t1 ...`` and images into its inputs; written without torchvision."""
    names = {_START: "<|vision_start|>", _END: "<|vision_end|>", _IMAGE: "<|image_pad|>", _VIDEO: "<|video_pad|>"}
    vocab = {names.get(i, f"t{i}"): i for i in range(vocab_size)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "t0", "eos_token": "t2", "additional_special_tokens": list(names.values())}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    processor_config(folder, patch_size)


def processor_config(folder: Path, patch_size: int, chat_template: str | None = None) -> None:
    """Save the config of a ``Qwen3VLProcessor`` beside its tokenizer: images of one to four by four tokens."""
    patches = {"patch_size": patch_size, "temporal_patch_size": 2, "merge_size": 2}
    spread = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    token = (2 * patch_size) ** 2
    processor = {
        "processor_class": "Qwen3VLProcessor",
        "image_processor": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": token, "longest_edge": 4 * token},
            **patches,
            **spread,
        },
        "video_processor": {"video_processor_type": "Qwen3VLVideoProcessor", **patches, **spread},
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)


@dataclass(frozen=True)
class VlmSample:
    """One sample.

    Args:
        sample: as those without images; its prompt may begin with images or a video.
        images: ``pixel_values`` and their grid or places, or those of videos; empty without an image.
        positions: ``(4, T)``, as verl makes them; ``(T,)`` of a model with one row of positions.
    """

    sample: Sample
    images: dict[str, torch.Tensor]
    positions: torch.Tensor


def vlm_samples(model: Any, without: Collection[int] = (), videos: Collection[int] = ()) -> list[VlmSample]:
    """Samples with one or two images each, but for those whose numbers are ``without``, or with one of ``videos``."""
    generator, found = torch.Generator().manual_seed(4), []
    for i, (ids, before, old, advantage) in enumerate(ppo_samples()):
        ids, images = ids % _START, {}
        if i not in without:
            grids, token = [_GRIDS[(i + k) % len(_GRIDS)] for k in range(1 + (i % 3 == 0))], _IMAGE
            if i in videos:
                grids, token = [(2, 2, 4)], _IMAGE if model.config.model_type in ONE_TOKEN_FOR_BOTH else _VIDEO
            seen = [[_START, *[token] * (h * w // 4), _END] for t, h, w in grids for _ in range(t)]
            ahead = torch.tensor([token for image in seen for token in image])
            ids, before = torch.cat([ids[:1], ahead, ids[1:]]), before + len(ahead)
            images = _pixels(model, grids, i in videos, generator)
            if "image_position_ids" in images:  # whose types of tokens verl keeps
                images["mm_token_type_ids"] = _kinds(ids, images)[None]
        found.append(VlmSample((ids, before, old, advantage), images, _positions(model, ids, images)))
    return found


def _pixels(
    model: Any, grids: list[tuple[int, int, int]], is_video: bool, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return random pixels of images or of one video, as the family takes them."""
    vision = model.config.vision_config
    if hasattr(vision, "pooling_kernel_size"):  # Gemma 4
        places = [torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(-1) for _, h, w in grids]
        padded = torch.stack([nn.functional.pad(each, (0, 0, 0, _MOST - len(each)), value=-1) for each in places])
        pixels = torch.rand(len(grids), _MOST, 3 * vision.patch_size**2, generator=generator)
        return {"pixel_values": pixels, "image_position_ids": padded}
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), width, generator=generator)
    if is_video:
        return {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor(grids)}
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def _kinds(ids: torch.Tensor, images: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return transformers' types of tokens: 0 text, 1 images, 2 videos."""
    return torch.isin(ids, torch.tensor([_IMAGE, _VIDEO])).int() * (2 if "pixel_values_videos" in images else 1)


def _positions(model: Any, ids: torch.Tensor, images: dict[str, torch.Tensor]) -> torch.Tensor:
    text = torch.arange(len(ids))[None]
    if not hasattr(model.base_model, "get_rope_index"):
        return text[0]
    if not images:
        return text.expand(4, -1)
    grids = {name: grid for name, grid in images.items() if name.endswith("_grid_thw")}
    vision, _ = model.base_model.get_rope_index(ids[None], mm_token_type_ids=_kinds(ids, images)[None], **grids)
    return torch.cat([text, vision[:, 0]])


def vlm_logits(model: Any, samples: list[VlmSample]) -> list[torch.Tensor]:
    """Each sample's logits by itself, ``(T, VOCAB)``; the model finds its positions."""
    found = []
    for each in samples:
        ids = each.sample[0][None]
        kinds = {"mm_token_type_ids": _kinds(ids, each.images)} if each.images else {}
        found.append(model(input_ids=ids, **{**each.images, **kinds}, use_cache=False).logits[0])
    return found


def vlm_batch(samples: list[VlmSample]) -> Any:
    """verl's no-padding batch of some samples."""
    return ppo_batch(
        [each.sample for each in samples],
        SAMPLES,
        PROMPT + _LONGEST,
        RESPONSE,
        positions=[each.positions for each in samples],
        images=[each.images for each in samples],
    )
