"""Tiny models with multi-token prediction layers, as checkpoints store them, and their drafts by plain operators."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.parity.family import Family
from tests.support.models.tiny import reference_model, save_random

__all__ = ["PlainDrafts", "save_with_mtp"]


def save_with_mtp(folder: Path, recipe: Family, depth: int, seed: int = 0) -> Path:
    """Save a random model with ``depth`` multi-token prediction layers, and copies of its embeddings and head."""
    layers = recipe.sizes["num_hidden_layers"]
    more = {name: of + of[-1:] * depth for name, of in recipe.sizes.items() if isinstance(of, list)}
    save_random(recipe.build(num_hidden_layers=layers + depth, **more), folder, seed, one_file=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": depth}
    config |= {name: config[name][:layers] for name in more}
    (folder / "config.json").write_text(json.dumps(config))
    tensors, width = load_file(folder / "model.safetensors"), config["hidden_size"]
    for index in range(layers, layers + depth):
        own = f"model.layers.{index}"
        tensors |= {f"{own}.{name}.weight": torch.rand(width) + 0.5 for name in ("enorm", "hnorm", "shared_head.norm")}
        tensors[f"{own}.eh_proj.weight"] = torch.randn(width, 2 * width) * 0.1
        tensors[f"{own}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{own}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # The same as decoder layers of transformers' model, for ``PlainDrafts``.
    (folder / "longer").mkdir()
    save_file(tensors, folder / "longer" / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_hidden_layers": layers + depth} | more
    (folder / "longer" / "config.json").write_text(json.dumps(config))
    return folder


class PlainDrafts:
    """The multi-token prediction layers of a checkpoint, beside transformers' model of it."""

    def __init__(self, folder: Path):
        self.policy: Any = reference_model(folder)
        config, tensors = self.policy.config, load_file(folder / "model.safetensors")
        self.layers, self.depth = config.num_hidden_layers, config.num_nextn_predict_layers
        decoder = reference_model(folder / "longer").model
        self.own = nn.ModuleList(decoder.layers[self.layers :])
        self.beside = {
            f"{i}.{name}.weight": tensors[f"model.layers.{self.layers + i}.{name}.weight"].requires_grad_()
            for i in range(self.depth)
            for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        }

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.policy.config.rms_norm_eps).rsqrt() * weight

    def named_gradients(self) -> dict[str, torch.Tensor]:
        """Return gradients by the names that parameters have in the engine's model."""
        found = {name: p.grad for name, p in (*self.beside.items(), *self.own.named_parameters())}
        moved = {n.partition(".")[::2]: grad for n, grad in found.items()}
        return {f"model.layers.{self.layers + int(i)}.{rest}": grad for (i, rest), grad in moved.items()}

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
        for i, layer in enumerate(self.own):
            ahead = embeddings.roll(-1 - i, 1).clone()
            ahead[:, 0] = 0
            parts = [
                self._rms(ahead, self.beside[f"{i}.enorm.weight"]),
                self._rms(state, self.beside[f"{i}.hnorm.weight"]),
            ]
            joined = torch.cat(parts, -1) @ self.beside[f"{i}.eh_proj.weight"].t()
            state = layer(joined, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
            state = self._rms(state, self.beside[f"{i}.shared_head.norm.weight"])
            p, q = ((x[0] @ head.t() / temperature).log_softmax(-1) for x in (hidden.roll(-1 - i, 1), state))
            losses.append(-(p.exp() * q).sum(-1))
            agrees.append(p.argmax(-1) == q.argmax(-1))
        return torch.stack(losses), torch.stack(agrees)
