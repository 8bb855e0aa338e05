"""Updates of a random combination of settings (``draws.py``), beside those of the plain model in one process."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification

from epfsdp2.engine.lora.adapters import SAVED, lora_of
from epfsdp2.engine.moe.find import find_experts
from epfsdp2.engine.moe.router.replay import RouterReplay
from tests.support.engine.lora import adapt, stirred
from tests.support.engine.sharded import whole_parameters
from tests.support.models.tiny import VOCAB
from tests.support.moe.router_formula import watched_routers
from tests.support.trainer.draws import Draw
from tests.support.trainer.ppo import (
    RESPONSE,
    SAMPLES,
    ppo_batch,
    ppo_samples,
    ppo_worker,
    value_worker,
    watched_gradients,
)
from tests.support.trainer.verl_worker import optimizer_config

__all__ = ["check_draw"]

TEMPERATURE, RELATIVE = 0.7, 1e-5
_jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)


def check_draw(draw: Draw, folder: Path, saved: Path) -> None:
    """On each rank: outputs, gradients, norm, loss and parameters of every update are the plain model's; collective.

    Args:
        folder: of the plain model.
        saved: where a checkpoint between two updates is written.

    Raises:
        SettingError: the settings are refused, which are those of the first update or of the one that goes on.
    """
    worker = _worker(draw, folder, draw.meshes[0])
    plain = _Plain(draw, folder, worker)
    for update, mesh in enumerate(draw.meshes):
        if update:
            worker.save_checkpoint(str(saved), global_step=1)
            worker = _worker(draw, folder, mesh)
            worker.load_checkpoint(str(saved))
        _check_update(draw, worker, plain)


def _worker(draw: Draw, folder: Path, mesh: dict[str, Any]) -> Any:
    model = {"override_config": {"attn_implementation": draw.attention}, **draw.model}
    make = value_worker if draw.is_critic else ppo_worker
    worker = make(folder, optimizer=draw.optimizer, model=model, **mesh, **draw.engine)
    worker.set_loss_fn(_loss(draw))
    lora = lora_of(worker.engine.module)
    if lora is not None:
        lora.initialize(worker.engine.module, 0, stirred(worker.engine.module))
    return worker


def _loss(draw: Draw) -> Any:
    from verl.workers.config import PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    from epfsdp2.engine.config import EPFSDP2ActorConfig, EPFSDP2CriticConfig

    if draw.is_critic:
        return partial(value_loss, config=EPFSDP2CriticConfig(ppo_micro_batch_size_per_gpu=2))
    chosen = {name: PolicyLossConfig(**value) if name == "policy_loss" else value for name, value in draw.actor.items()}
    return partial(ppo_loss, config=EPFSDP2ActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=2, **chosen))


class _Plain:
    """The plain model, what it trains, and what comes with the samples from elsewhere."""

    def __init__(self, draw: Draw, folder: Path, worker: Any):
        self.draw, self.samples, module = draw, ppo_samples(), worker.engine.module
        lora = lora_of(module)
        head = {
            name.removesuffix(SAVED): tensor.detach()
            for name, tensor in (whole_parameters(module) if draw.is_critic else {}).items()
            if name.startswith(("score.", "lm_head.")) and (lora is None or name.endswith(SAVED))
        }
        if draw.is_critic:  # the last tokens of a vocabulary may stand for images
            self.samples = [(ids % (VOCAB - 16), *others) for ids, *others in self.samples]
        self.model = self._load(folder, head)
        self.experts = find_experts(self.model)  # of which adapters make other classes
        layers = self.model.config.get_text_config().num_hidden_layers
        self.replay = RouterReplay(self.model, self.experts, layers)
        self.leaves: dict[str, nn.Parameter] = {} if lora is None else adapt(self.model, module)
        if lora is not None:
            self.leaves |= {name + SAVED: self.model.get_parameter(name).requires_grad_() for name in head}
        self.leaves = self.leaves or dict(self.model.named_parameters())
        self.optimizer = self._optimizer()
        self.routes = self._other_routes() if draw.replay == "R3" else None
        with torch.no_grad():
            self.near = [found[0] for found in self.outputs()]
        generator = torch.Generator().manual_seed(5)
        self.old, self.reference = (self._noisy(scale, generator) for scale in (0.3, 0.5))

    def _load(self, folder: Path, head: dict[str, torch.Tensor]) -> nn.Module:
        own: dict[str, Any] = {"num_labels": 1, "classifier_dropout": 0.0} if self.draw.is_critic else {}
        config = AutoConfig.from_pretrained(folder, attn_implementation=self.draw.attention, **own)
        auto = AutoModelForTokenClassification if "score.weight" in head else AutoModelForCausalLM
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") and self.draw.is_critic else auto
        model = auto.from_pretrained(folder, config=config, dtype=torch.float32, experts_implementation="eager")
        if "lm_head.weight" in head:  # of a family without a class for token classification
            model.set_output_embeddings(nn.Linear(config.get_text_config().hidden_size, 1, bias=False))
        model.load_state_dict(head, strict=False)
        return model

    def _optimizer(self) -> torch.optim.Optimizer:
        from verl.workers.config.optimizer import build_optimizer

        return build_optimizer(self.leaves.values(), optimizer_config(**self.draw.optimizer))

    def _other_routes(self) -> list[torch.Tensor]:
        """Return for each sample other experts than the routers choose, each once: ``[T, layers, k]``."""
        routes = []
        for ids, *_ in self.samples:
            self.replay.record()
            with torch.no_grad():
                self.model(input_ids=ids[None], use_cache=False)
            routes.append((self.replay.recorded() + 3) % 8)
        self.replay.stop()
        return routes

    def _noisy(self, scale: float, generator: torch.Generator) -> torch.Tensor:
        """Log-probs of the responses, or values, that are not far: ``[SAMPLES, RESPONSE]``."""
        found = torch.zeros(SAMPLES, RESPONSE)
        for i, (ids, prompt, *_) in enumerate(self.samples):
            after = len(ids) - prompt
            found[i, :after] = self.near[i][prompt - 1 : -1] + scale * torch.randn(after, generator=generator)
        return found

    def outputs(self) -> list[tuple[torch.Tensor, ...]]:
        """Return for each sample the log-probs of all tokens and their entropies, or the values."""
        found: list[tuple[torch.Tensor, ...]] = []
        for i, (ids, *_) in enumerate(self.samples):
            if self.routes is not None:
                self.replay.replay(self.routes[i])
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
            if self.draw.is_critic:
                found.append((logits[:, 0],))
                continue
            every = (logits / TEMPERATURE).log_softmax(-1)
            found.append((every.gather(-1, ids.roll(-1)[:, None])[:, 0], -(every.exp() * every).sum(-1)))
        return found

    def batch(self, chosen: slice) -> Any:
        """Some of the samples, as verl's trainer makes them."""
        from verl.utils import tensordict_utils as tu

        batch = ppo_batch(self.samples[chosen])
        batch["old_log_probs"], batch["ref_log_prob"] = self.old[chosen], self.reference[chosen]
        batch["values"], batch["returns"] = self.old[chosen], batch["advantages"]
        if self.routes is not None:
            batch["routed_experts"] = _jagged(self.routes[chosen])
        tu.assign_non_tensor(batch, calculate_entropy=bool(self.draw.actor.get("entropy_coeff")))
        return batch

    def update(self) -> tuple[float, dict[str, torch.Tensor], float]:
        """Step; return the loss, the gradients that the step took, and their norm before it was clipped."""
        from verl.utils import tensordict_utils as tu

        self.optimizer.zero_grad()
        sigmoid = any(self.draw.router_coefs) and self.draw.by_sigmoid
        batch = self.batch(slice(None))
        tu.assign_non_tensor(batch, dp_size=1, batch_num_tokens=batch["loss_mask"].sum().item())
        aux, z = self.draw.router_coefs
        if aux or z:
            with watched_routers(self.model, self.experts, sigmoid) as losses:
                outputs, (aux_loss, z_loss) = self.outputs(), losses()
            added = aux * aux_loss + z * z_loss
        else:
            outputs, added = self.outputs(), torch.zeros(())
        parts = [_jagged(part) for part in zip(*outputs, strict=True)]
        names = ("values",) if self.draw.is_critic else ("log_probs", "entropy")
        found = dict(zip(names, parts, strict=True))
        if not self.draw.actor.get("entropy_coeff"):
            found.pop("entropy", None)
        loss, _ = _loss(self.draw)(model_output=found, data=batch)
        (loss + added).backward()
        for leaf in self.leaves.values():
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        limit = self.draw.optimizer.get("clip_grad", 1e9)
        norm = torch.nn.utils.clip_grad_norm_(self.leaves.values(), limit).item()
        gradients = {name: leaf.grad.clone() for name, leaf in self.leaves.items()}
        self.optimizer.step()
        return loss.item(), gradients, norm


def _check_update(draw: Draw, worker: Any, plain: _Plain) -> None:
    from verl.utils import tensordict_utils as tu

    ranks, rank = worker.engine.get_data_parallel_size(), worker.engine.get_data_parallel_rank()
    mine = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
    infer, batch = plain.batch(mine), plain.batch(mine)
    tu.assign_non_tensor(infer, compute_loss=False)
    output = worker.infer_batch(infer)
    if worker.engine.is_mp_src_rank_with_outputs():
        got = tu.get(output, "values" if draw.is_critic else "log_probs").unbind()
        with torch.no_grad():
            wanted = plain.outputs()[mine]
        for one, (want, *_) in zip(got, wanted, strict=True):
            torch.testing.assert_close(one[:-1], want[:-1].to(one.dtype), rtol=1e-5, atol=1e-5)
    if draw.replay == "R2":
        batch["routed_experts"] = _of_those_who_know(worker, output)

    seen = watched_gradients(worker)
    output = worker.train_batch(batch)
    loss, gradients, norm = plain.update()
    assert seen.keys() <= gradients.keys()
    assert not any(gradients[name].any() for name in gradients.keys() - seen.keys())  # of a vision tower
    _assert_near(seen, {name: gradients[name] for name in seen}, "gradient of")
    _assert_near(whole_parameters(worker.engine.module), {name: plain.leaves[name] for name in seen}, "")
    if worker.engine.is_mp_src_rank_with_outputs():
        metrics = tu.get(output, "metrics")
        assert abs(metrics["grad_norm"] / norm - 1) < RELATIVE, (metrics["grad_norm"], norm)
        assert abs(metrics["loss"] - loss) < 1e-5 * abs(loss) + 1e-6, (metrics["loss"], loss)
        if any(draw.router_coefs):
            assert torch.tensor(metrics["router_dropped"]).unique().tolist() == [0.0], metrics["router_dropped"]


def _assert_near(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    largest = max(want.norm().item() for want in wanted.values())
    for name, want in wanted.items():
        want = want.detach()
        error = ((got[name].detach() - want).norm() / want.norm().clamp_min(1e-6 * largest)).item()
        assert error < RELATIVE, f"{what} {name}: {error:.1e}"


def _of_those_who_know(worker: Any, output: Any) -> torch.Tensor:
    """The routes that the ranks with outputs have recorded of this rank's samples; collective."""
    from verl.utils import tensordict_utils as tu

    known = None
    if worker.engine.is_mp_src_rank_with_outputs():
        known = [routes.clone() for routes in tu.get(output, "routed_experts").unbind()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (worker.engine.get_data_parallel_rank(), known))
    return _jagged(next(known for r, known in everyone if r == worker.engine.get_data_parallel_rank() and known))
