"""Tiny models with multi-token prediction layers, as checkpoints store them, and their drafts by plain operators."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from epfsdp2.engine.compat.versions import vllm_in
from tests.parity.family import Family
from tests.support.models.tiny import publish, reference_model, save_random

__all__ = ["DRAFTS", "PlainDrafts", "is_beside", "save_with_mtp"]

DRAFTS = pytest.mark.skipif(
    not vllm_in(">=0.27"), reason="vLLM 0.24's CPU build ends when it drafts: a kernel of its sampler lacks an argument"
)

# Names of the two norms before the projection, the projection, and the norm after the layer.
_IN_DECODER = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_LATER = ("enorm", "hnorm", "eh_proj", "final_layernorm")
_BESIDE = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_OTHERS = {
    "bailing_hybrid": _LATER,
    "deepseek_v4": ("layers.0.enorm", "layers.0.hnorm", "layers.0.e_proj", "layers.0.norm"),
    "hy_v3": _LATER,
    "inkling_mm_model": ("embed_norm", "hidden_norm", "input_proj"),
    "nemotron_h": ("layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.1.final_layernorm"),
    "step3p7": ("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm"),
}
_OWN_HEAD = "transformer.shared_head.output.weight"  # Step-3.7's

# Entries of an MTP layer in a config's lists.
_KINDS = {"layer_types": ["full_attention"], "indexer_types": ["full"], "layers_block_type": ["attention", "moe"]}


def is_beside(family: str) -> bool:
    """Whether checkpoints of the family have the layer at ``mtp.layers``, not after the decoder's."""
    return family.startswith(("deepseek_v4", "mellum", "nemotron_h", "qwen3_next", "qwen3_5"))


def _around(family: str) -> tuple[str, ...]:
    return _OTHERS.get(family, _BESIDE if is_beside(family) else _IN_DECODER)


def save_with_mtp(folder: Path, recipe: Family, depth: int, seed: int = 0) -> Path:
    """Save a random model with ``depth`` multi-token prediction layers, and copies of its embeddings and head."""
    sizes = recipe.sizes.get("text_config", recipe.sizes)
    blocks = sizes.get("layers_block_type", [])
    layers, added = len(blocks) or sizes["num_hidden_layers"], 2 if blocks else depth
    more = {name: of + of[-1:] * added for name, of in sizes.items() if isinstance(of, list)}
    for name, kinds in _KINDS.items():
        if name in more:
            more[name][layers:] = kinds * (added // len(kinds))
    if "sliding_attention" in sizes.get("layer_types", []):
        more["layer_types"][layers:] = ["sliding_attention"] * added
    if has_streams := recipe.config == "DeepseekV4Config":
        more["layer_types"] = [*recipe.build().config.layer_types, "sliding_attention"]
    if is_inkling := recipe.config == "InklingConfig":
        more["layer_types"][layers:] = ["hybrid", "hybrid_sliding"][:depth]
        more["mlp_layer_types"][layers:] = ["dense"] * depth
    if has_head := recipe.config == "Step3p7Config":
        more["mlp_layer_types"][layers:] = ["dense"] * depth
        for name in ("swiglu_limits", "swiglu_limits_shared"):
            more[name][layers:] = [None] * depth
    more["num_hidden_layers"] = layers + added
    more = {"text_config": sizes | more} if "text_config" in recipe.sizes else more
    save_random(recipe.build(**more), folder, seed, one_file=True)
    longer = (folder / "config.json").read_text()
    config = json.loads(longer)
    text, beside = config.get("text_config", config), is_beside(config["model_type"])
    if "qwen3_5" in config["model_type"]:
        text["mtp_num_hidden_layers"] = depth
    elif is_inkling:
        config["mtp_config"] = {"num_nextn_predict_layers": depth, "local_layer_ids": [1]}
        for name in ("num_mtp_layers", "mtp_local_layer_ids"):
            del text[name]
    elif config["model_type"] != "qwen3_next":  # its published configs have no number
        text["num_nextn_predict_layers"] = depth
    lists = {name: of for name, of in text.items() if isinstance(of, list) and len(of) == layers + added}
    text |= {"num_hidden_layers": layers}
    if has_head:  # its published lists have entries of these layers
        del text["per_layer_config"]
    else:
        text |= {name: of[:layers] for name, of in lists.items()}
    (folder / "config.json").write_text(json.dumps(config))
    tensors, width = load_file(folder / "model.safetensors"), text["hidden_size"]
    (folder / "longer").mkdir()  # the same as decoder layers of transformers' model, for ``PlainDrafts``
    save_file(tensors, folder / "longer" / "model.safetensors", metadata={"format": "pt"})
    (folder / "longer" / "config.json").write_text(longer)
    decoder = next(name.partition("layers.")[0] for name in tensors if f"layers.{layers}." in name)
    for index in range(layers, layers + added):
        own, new = f"{decoder}layers.{index}.", f"mtp.layers.{index - layers}."
        if is_inkling:
            new = f"model.{new}transformer_block."
        if beside or is_inkling:
            tensors = {re.sub(f"^{re.escape(own)}", new, name): tensor for name, tensor in tensors.items()}
    for index in range(depth):
        own = "mtp" if beside else f"{decoder}layers.{layers + index}"
        own = f"model.mtp.layers.{index}" if is_inkling else own
        if has_head:
            tensors[f"{own}.{_OWN_HEAD}"] = torch.randn(tensors["lm_head.weight"].shape) * 0.1
        elif not beside and not is_inkling and "model.embed_tokens.weight" in tensors:
            tensors[f"{own}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{own}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        first, second, projection, *last = _around(config["model_type"])
        tensors |= {f"{own}.{name}.weight": torch.rand(width) + 0.5 for name in (first, second, *last)}
        tensors[f"{own}.{projection}.weight"] = torch.randn(width, width if has_streams else 2 * width) * 0.1
    if has_streams:
        tensors["mtp.layers.0.h_proj.weight"] = torch.randn(width, width) * 0.1
        heads = [name for name in tensors if "hc_head" in name]
        tensors |= {f"mtp.layers.0.hc_head_{n.rpartition('_')[2]}": torch.rand(tensors[n].shape) for n in heads}
        tensors = {name.replace("mtp.layers.0.", "mtp.0."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    publish(folder)
    return folder


class PlainDrafts:
    """The multi-token prediction layers of a checkpoint, beside transformers' model of it."""

    def __init__(self, folder: Path):
        self.policy: Any = reference_model(folder, "eager")  # GlmMoeDsa of 5.9 is not causal by sdpa
        config, tensors = self.policy.config.get_text_config(), load_file(folder / "model.safetensors")
        self.layers, self.beside = config.num_hidden_layers, is_beside(config.model_type)
        self.is_inkling = self.policy.config.model_type == "inkling_mm_model"
        decoder = reference_model(folder / "longer", "eager").get_decoder()
        added, blocks = decoder.layers[self.layers :], 2 if config.model_type == "nemotron_h" else 1
        self.own = [added[i : i + blocks] for i in range(0, len(added), blocks)]
        self.windows = [getattr(getattr(blocks[0], "self_attn", None), "sliding_window", None) for blocks in self.own]
        self.names = _around(self.policy.config.model_type)
        self.decoder = next(n for n, m in self.policy.named_modules() if m is self.policy.get_decoder())
        self.streams = {}
        if config.model_type == "deepseek_v4":
            tensors = {
                name.replace("hc_head_", "hc_head.hc_").replace("mtp.0.", "mtp.layers.0."): tensor
                for name, tensor in tensors.items()
            }
            own = [name for name in tensors if name.startswith(("mtp.layers.0.h_proj", "mtp.layers.0.hc_head"))]
            self.streams = {name: tensors[name].requires_grad_() for name in own}
        self.around = [
            [tensors[f"{self._prefix(i)}.{name}.weight"].requires_grad_() for name in self.names]
            for i in range(self.depth)
        ]
        heads = [tensors.get(f"{self._prefix(i)}.{_OWN_HEAD}") for i in range(self.depth)]
        self.heads = [head.requires_grad_() for head in heads if head is not None]

    @property
    def depth(self) -> int:
        return len(self.own)

    def _prefix(self, index: int) -> str:
        if self.is_inkling:
            return f"model.mtp.layers.{index}"
        return "mtp" if self.beside else f"model.layers.{self.layers + index}"

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        model = self.policy.get_decoder()
        return torch.func.functional_call(getattr(model, "norm", None) or model.norm_f, {"weight": weight}, x)

    def named_gradients(self) -> dict[str, torch.Tensor | None]:
        """Return gradients by the names that parameters have in the engine's model."""
        found = {name: parameter.grad for name, parameter in self.streams.items()}
        for i, (layer, around) in enumerate(zip(self.own, self.around, strict=True)):
            prefix = self._prefix(i)
            found |= {f"{prefix}.{name}.weight": p.grad for name, p in zip(self.names, around, strict=True)}
            for k, block in enumerate(layer):
                inner = f"{prefix}.layers.{k}" if self.beside else prefix
                found |= {f"{inner}.{name}": p.grad for name, p in block.named_parameters()}
        found |= {f"{self._prefix(i)}.{_OWN_HEAD}": head.grad for i, head in enumerate(self.heads)}
        own = f"{self.decoder}.layers."
        return {re.sub(r"^model\.layers\.", own, name): gradient for name, gradient in found.items()}

    def __call__(self, ids: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cross-entropies ``[depth, T]`` of the drafts from each token, and whether the modes are equal."""
        model, config = self.policy.get_decoder(), self.policy.config.get_text_config()
        head = self.policy.lm_head.weight.detach()[: getattr(config, "unpadded_vocab_size", None)]
        with torch.no_grad():
            embeddings = model.get_input_embeddings()(ids[None])
            positions = torch.arange(len(ids))[None]
            seen: list[torch.Tensor] = []
            watched = model.hc_head if self.streams else model.norm if self.heads else torch.nn.Identity()
            hook = watched.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
            hidden = model(input_ids=ids[None], use_cache=False).last_hidden_state
            hook.remove()
            state = seen[0] if seen else hidden
            if self.streams:
                rotary = {"main": model.rotary_emb(hidden, positions, "main")}
            else:
                kind = ("sliding_attention",) if self.windows[0] else ()
                rotary = model.rotary_emb(hidden, positions, *kind) if hasattr(model, "rotary_emb") else None
        losses, agrees = [], []
        unseen = torch.full((len(ids), len(ids)), float("-inf"))
        divisor = getattr(config, "logits_mup_width_multiplier", 1)
        for i, (layer, (first, second, projection, *last)) in enumerate(zip(self.own, self.around, strict=True)):
            mask = (unseen.triu(1) + unseen.tril(-(self.windows[i] or len(ids))))[None, None]
            ahead = embeddings.roll(-1 - i, 1).clone()
            if self.streams or not (self.beside or self.is_inkling or self.heads):
                ahead[:, 0] = 0
            ahead, state = self._norm(ahead, first), self._norm(state, second)
            if self.streams:
                state = (ahead @ projection.t())[:, :, None] + state @ self.streams["mtp.layers.0.h_proj.weight"].t()
            else:
                state = torch.cat([state, ahead] if self.is_inkling else [ahead, state], -1) @ projection.t()
            for block in layer:
                found = block(state, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
                state = found[0] if isinstance(found, tuple) else found
            if self.streams:
                own = {name: self.streams[f"mtp.layers.0.hc_head.{name}"] for name in ("hc_fn", "hc_base", "hc_scale")}
                state = torch.func.functional_call(model.hc_head, own, state)
            draft = self._norm(state, *last) if last else state
            state, own = (state, self.heads[i]) if self.heads else (draft, head)
            logits = (x[0] / divisor @ of.t() / temperature for x, of in ((hidden.roll(-1 - i, 1), head), (draft, own)))
            p, q = (each.log_softmax(-1) for each in logits)
            losses.append(-(p.exp() * q).sum(-1))
            agrees.append(p.argmax(-1) == q.argmax(-1))
        return torch.stack(losses), torch.stack(agrees)
