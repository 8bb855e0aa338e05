"""Tiny models with multi-token prediction layers, as checkpoints store them, and their drafts by plain operators."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.parity.family import Family
from tests.support.models.tiny import reference_model, save_random

__all__ = ["PlainDrafts", "is_beside", "save_with_mtp"]

# Names of the two norms before the projection, the projection, and the norm after the layer.
_IN_DECODER = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_LATER = ("enorm", "hnorm", "eh_proj", "final_layernorm")
_BESIDE = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


def is_beside(family: str) -> bool:
    """Whether checkpoints of the family have the layer at ``mtp.layers.0``, not after the decoder's."""
    return family.startswith(("qwen3_next", "qwen3_5"))


def _around(family: str) -> tuple[str, ...]:
    later = family in ("bailing_hybrid", "hy_v3")
    return _BESIDE if is_beside(family) else _LATER if later else _IN_DECODER


def save_with_mtp(folder: Path, recipe: Family, depth: int, seed: int = 0) -> Path:
    """Save a random model with ``depth`` multi-token prediction layers, and copies of its embeddings and head."""
    sizes = recipe.sizes.get("text_config", recipe.sizes)
    layers = sizes["num_hidden_layers"]
    more = {name: of + of[-1:] * depth for name, of in sizes.items() if isinstance(of, list)}
    for name, kind in (("layer_types", "full_attention"), ("indexer_types", "full")):
        if name in more:
            more[name][-depth:] = [kind] * depth
    more["num_hidden_layers"] = layers + depth
    more = {"text_config": sizes | more} if "text_config" in recipe.sizes else more
    save_random(recipe.build(**more), folder, seed, one_file=True)
    longer = (folder / "config.json").read_text()
    config = json.loads(longer)
    text, beside = config.get("text_config", config), is_beside(config["model_type"])
    if not beside:
        text["num_nextn_predict_layers"] = depth
    elif config["model_type"] != "qwen3_next":  # its published configs have no number
        text["mtp_num_hidden_layers"] = depth
    lists = {name: of for name, of in text.items() if isinstance(of, list) and len(of) == layers + depth}
    text |= {"num_hidden_layers": layers} | {name: of[:layers] for name, of in lists.items()}
    (folder / "config.json").write_text(json.dumps(config))
    tensors, width = load_file(folder / "model.safetensors"), text["hidden_size"]
    (folder / "longer").mkdir()  # the same as decoder layers of transformers' model, for ``PlainDrafts``
    save_file(tensors, folder / "longer" / "model.safetensors", metadata={"format": "pt"})
    (folder / "longer" / "config.json").write_text(longer)
    for index in range(layers, layers + depth):
        own = f"{'model.language_model' if text is not config else 'model'}.layers.{index}"
        if beside:
            moved = {name: f"mtp.layers.0{name.removeprefix(own)}" for name in tensors if name.startswith(f"{own}.")}
            tensors |= {new: tensors.pop(name) for name, new in moved.items()}
            own = "mtp"
        elif "model.embed_tokens.weight" in tensors:
            tensors[f"{own}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{own}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        first, second, projection, last = _around(config["model_type"])
        tensors |= {f"{own}.{name}.weight": torch.rand(width) + 0.5 for name in (first, second, last)}
        tensors[f"{own}.{projection}.weight"] = torch.randn(width, 2 * width) * 0.1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class PlainDrafts:
    """The multi-token prediction layers of a checkpoint, beside transformers' model of it."""

    def __init__(self, folder: Path):
        self.policy: Any = reference_model(folder, "eager")  # GlmMoeDsa of 5.9 is not causal by sdpa
        config, tensors = self.policy.config, load_file(folder / "model.safetensors")
        self.layers, self.beside = config.num_hidden_layers, is_beside(config.model_type)
        decoder = reference_model(folder / "longer", "eager").model
        self.own = nn.ModuleList(decoder.layers[self.layers :])
        self.names = _around(config.model_type)
        self.around = [
            [tensors[f"{self._prefix(i)}.{name}.weight"].requires_grad_() for name in self.names]
            for i in range(self.depth)
        ]

    @property
    def depth(self) -> int:
        return len(self.own)

    def _prefix(self, index: int) -> str:
        return "mtp" if self.beside else f"model.layers.{self.layers + index}"

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(self.policy.model.norm, {"weight": weight}, x)

    def named_gradients(self) -> dict[str, torch.Tensor | None]:
        """Return gradients by the names that parameters have in the engine's model."""
        found = {}
        for i, (layer, around) in enumerate(zip(self.own, self.around, strict=True)):
            prefix = self._prefix(i)
            found |= {f"{prefix}.{name}.weight": p.grad for name, p in zip(self.names, around, strict=True)}
            inner = f"{prefix}.layers.0" if self.beside else prefix
            found |= {f"{inner}.{name}": p.grad for name, p in layer.named_parameters()}
        return found

    def __call__(self, ids: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cross-entropies ``[depth, T]`` of the drafts from each token, and whether the modes are equal."""
        model, head = self.policy.model, self.policy.lm_head.weight.detach()
        with torch.no_grad():
            embeddings = model.embed_tokens(ids[None])
            hidden = model(input_ids=ids[None], use_cache=False).last_hidden_state
            positions = torch.arange(len(ids))[None]
            rotary = model.rotary_emb(hidden, positions)
        state, losses, agrees = hidden, [], []
        mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
        for i, (layer, (first, second, projection, last)) in enumerate(zip(self.own, self.around, strict=True)):
            ahead = embeddings.roll(-1 - i, 1).clone()
            if not self.beside:
                ahead[:, 0] = 0
            joined = torch.cat([self._norm(ahead, first), self._norm(state, second)], -1) @ projection.t()
            found = layer(joined, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
            state = self._norm(found[0] if isinstance(found, tuple) else found, last)
            p, q = ((x[0] @ head.t() / temperature).log_softmax(-1) for x in (hidden.roll(-1 - i, 1), state))
            losses.append(-(p.exp() * q).sum(-1))
            agrees.append(p.argmax(-1) == q.argmax(-1))
        return torch.stack(losses), torch.stack(agrees)
