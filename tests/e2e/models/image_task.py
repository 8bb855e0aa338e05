"""A task with images, made offline: a coloured square is shown, and the answer is its colour's digit.

verl reads images with ``qwen_vl_utils``, which needs torchvision; ``Pictures`` is verl's dataset without that.
"""

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast
from verl.utils.dataset.rl_dataset import RLHFDataset

from epfsdp2.recipes.quickstart.model import SPECIAL, build_tokenizer
from tests.rollout.served_families import SERVED
from tests.support.models.published import save_published
from tests.support.models.tiny import publish, save_random
from tests.support.models.vlm import processor_config

__all__ = ["Pictures", "compute_score", "write_task"]

SOURCE = "epfsdp2/colours"
COLOURS = ("black", "red", "lime", "blue", "yellow", "magenta", "cyan", "white", "gray", "purple")
PATCH = 16
_VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Pictures(RLHFDataset):
    """verl's dataset, for images that are images already."""

    @classmethod
    def _process_multi_modal_info(cls, messages, image_patch_size, config):
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        return [part["image"].convert("RGB") for part in parts if part["type"] == "image"] or None, None, None


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_settings) -> float:
    """The share of digits in the answer, and 1.0 more for the colour's digit alone: random models get some too."""
    assert data_source == SOURCE
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1) + (solution_str == ground_truth)


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL[2:5], *_VISION]})
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def write_task(folder: Path, family: str, rows: int) -> tuple[Path, Path]:
    """Write a model with its processor, and data in which every fifth row has no image; return folder and file."""
    model, tokenizer = folder / "model", _tokenizer()
    start, end, image, video = tokenizer.convert_tokens_to_ids(_VISION)
    small = SERVED[family].family
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {
        "text_config": {**small.sizes["text_config"], "vocab_size": len(tokenizer), **ids},
        "vision_config": {**small.sizes["vision_config"], "patch_size": PATCH},
        **{"vision_start_token_id": start, "vision_end_token_id": end},
        **{"image_token_id": image, "video_token_id": video},
    }
    plain = replace(small, sizes={**small.sizes, **sizes}).build().float()
    save_random(plain, model, seed=1)
    _calm(plain, [start, end, image, video])
    save_published(plain, model, seed=1)
    publish(model)
    tokenizer.save_pretrained(model)
    processor_config(model, PATCH, chat_template=_TEMPLATE)
    pd.DataFrame([_row(i) for i in range(rows)]).to_parquet(folder / "train.parquet")
    return model, folder / "train.parquet"


@torch.no_grad()
def _calm(model: Any, improbable: list[int]) -> None:
    """Halve the matrices, because a random tower magnifies bfloat16's rounding errors more than what it sees.

    Also give tokens a probability below float32's precision after every text token: verl keeps vLLM from sampling them.
    One channel of the residual stream is the same for all text tokens, because no layer writes it.
    """
    for parameter in model.parameters():
        parameter *= 0.5 if parameter.dim() > 1 else 1
    model.get_input_embeddings().weight[:, 0] = 0.5
    for name, weight in model.get_decoder().layers.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weight[0] = 0
        elif name.endswith("experts.down_proj"):
            weight[:, 0] = 0
    model.lm_head.weight[:, 0] = 0
    model.lm_head.weight[improbable, 0] = -100


def _row(i: int) -> dict:
    digit, file = i % len(COLOURS), BytesIO()
    Image.new("RGB", (4 * PATCH, (2 + 2 * (i % 2)) * PATCH), COLOURS[digit]).save(file, "PNG")
    seen = i % 5 != 4
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": "<image>=" if seen else f"{digit}="}],
        "images": [{"bytes": file.getvalue()}] if seen else [],
        "reward_model": {"style": "rule", "ground_truth": str(digit)},
        "extra_info": {"index": i},
    }
