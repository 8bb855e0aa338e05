"""PPO updates through verl's own TrainingWorker: samples, the batch that verl makes of them, an actor; and a check."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.parity.float64 import float64
from tests.support.engine.sharded import whole_gradients, whole_parameters
from tests.support.models.tiny import VOCAB, reference_model, relative_error
from tests.support.trainer.verl_worker import optimizer_config, training_worker

__all__ = [
    "PADDED",
    "PROMPT",
    "RESPONSE",
    "SAMPLES",
    "Sample",
    "check_ppo_updates",
    "check_ppo_updates_in_float64",
    "infer",
    "of_this_rank",
    "plain_log_probs",
    "plain_ppo_loss",
    "ppo_batch",
    "ppo_samples",
    "ppo_worker",
    "reference_update",
    "value_worker",
    "watched_gradients",
]

SAMPLES, PROMPT, RESPONSE = 16, 5, 9
PADDED = {"use_remove_padding": False}
_RELATIVE = 1e-5

Sample = tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]


def ppo_samples(count: int = SAMPLES, prompt: int = PROMPT, response: int = RESPONSE) -> list[Sample]:
    """Per sample: ids, length of the prompt in them, old log-probs and advantages of the response.

    Args:
        prompt: the longest; lengths differ.
        response: the longest.
    """
    generator = torch.Generator().manual_seed(3)
    samples = []
    for i in range(count):
        before, after = 2 + i % (prompt - 1), 3 + (5 * i) % (response - 2)
        ids = torch.randint(0, VOCAB, (before + after,), generator=generator)
        old = -2.0 - torch.rand(after, generator=generator)
        samples.append((ids, before, old, torch.randn(after, generator=generator)))
    return samples


def plain_ppo_loss(
    samples: Sequence[Sample], logits: Sequence[torch.Tensor], masks: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """verl's formula: clipped ratio, mean over all response tokens, entropy bonus.

    Args:
        logits: of each sample the plain model's, ``(T, VOCAB)``.
        masks: of each sample which tokens of the response the policy wrote; all of them by default.
    """
    masks = masks or [torch.ones(len(old), dtype=torch.bool) for _, _, old, _ in samples]
    losses = []
    for (ids, prompt, old, advantage), scores, mask in zip(samples, logits, masks, strict=True):
        log_probs = (scores[prompt - 1 : -1] / 0.7).log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        log_prob = log_probs.gather(-1, ids[prompt:, None])[:, 0]
        ratio = (log_prob - old).clamp(-20, 20).exp()
        clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        dual = torch.minimum(-advantage * 3.0, clipped)
        losses.append((torch.where(advantage < 0, dual, clipped) - 0.01 * entropy)[mask].sum())
    return torch.stack(losses).sum() / sum(int(mask.sum()) for mask in masks)


def ppo_batch(
    samples: Sequence[Sample],
    of_all_ranks: int = SAMPLES,
    prompt: int = PROMPT,
    response: int = RESPONSE,
    positions: Sequence[torch.Tensor] | None = None,
    images: Sequence[Mapping[str, torch.Tensor]] | None = None,
    masks: Sequence[torch.Tensor] | None = None,
):
    """verl's no-padding batch of some samples, which are a part of so many.

    Args:
        masks: see ``plain_ppo_loss``.
        positions: of each sample the position ids, ``(4, T)`` with images.
        images: of each sample what verl calls its ``multi_modal_inputs``.
    """
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    n, width = len(samples), prompt + response
    positions = positions or [torch.arange(len(ids)) for ids, *_ in samples]
    data = {
        "input_ids": torch.zeros(n, width, dtype=torch.long),
        "attention_mask": torch.zeros(n, width, dtype=torch.long),
        "position_ids": torch.zeros(n, *positions[0].shape[:-1], width, dtype=torch.long),
        "prompts": torch.zeros(n, prompt, dtype=torch.long),
        "responses": torch.zeros(n, response, dtype=torch.long),
        "response_mask": torch.zeros(n, response, dtype=torch.long),
        "old_log_probs": torch.zeros(n, response),
        "advantages": torch.zeros(n, response),
    }
    for i, (ids, before, old, advantage) in enumerate(samples):
        after, start = len(ids) - before, prompt - before
        data["input_ids"][i, start : start + len(ids)] = ids
        data["attention_mask"][i, start : start + len(ids)] = 1
        data["position_ids"][i, ..., start : start + len(ids)] = positions[i]
        data["prompts"][i, start:] = ids[:before]
        data["responses"][i, :after] = ids[before:]
        data["response_mask"][i, :after] = 1 if masks is None else masks[i]
        data["old_log_probs"][i, :after] = old
        data["advantages"][i, :after] = advantage
    batch = left_right_2_no_padding(TensorDict(data, batch_size=[n]))
    tu.assign_non_tensor(batch, global_batch_size=of_all_ranks, temperature=0.7, calculate_entropy=True)
    if images is not None:
        tu.assign_non_tensor_stack(batch, "multi_modal_inputs", list(images))
    return batch


def _engine(
    ep: int,
    fsdp_size: int = -1,
    dynamic: bool = False,
    micro_batch: int = 2,
    infer_micro_batch: int | None = None,
    tokens: int = 40,
    **settings: Any,
) -> Any:
    from epfsdp2.engine.config import EPFSDP2EngineConfig

    return EPFSDP2EngineConfig(
        ep_size=ep,
        fsdp_size=fsdp_size,
        use_dynamic_bsz=dynamic,
        max_token_len_per_gpu=tokens,
        infer_max_token_len_per_gpu=tokens,
        micro_batch_size_per_gpu=micro_batch,
        infer_micro_batch_size_per_gpu=infer_micro_batch or micro_batch,
        **{"mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32"}, **settings},
    )


def ppo_worker(
    folder: Path,
    *mesh: int,
    model: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """An actor in float32.

    Args:
        mesh: sizes of ``ep`` and of a copy of the model.
        model: verl's settings of the model.
        optimizer: arguments of torch's AdamW besides the learning rate.
        settings: the engine's; ``tokens`` is the most of a dynamic micro-batch.
    """
    from verl.workers.utils.losses import ppo_loss

    from epfsdp2.engine.config import EPFSDP2ActorConfig

    actor = EPFSDP2ActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=2, entropy_coeff=0.01, clip_ratio_c=3.0)
    engine, loss = _engine(*mesh, **settings), partial(ppo_loss, config=actor)
    return training_worker(folder, "language_model", engine, loss, optimizer=optimizer, **(model or {}))


def value_worker(
    folder: Path,
    *mesh: int,
    model: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A critic in float32, with the arguments of ``ppo_worker``."""
    from verl.workers.utils.losses import value_loss

    from epfsdp2.engine.config import EPFSDP2CriticConfig

    loss = partial(value_loss, config=EPFSDP2CriticConfig(ppo_micro_batch_size_per_gpu=2))
    engine = _engine(*mesh, **settings)
    return training_worker(folder, "value_model", engine, loss, optimizer=optimizer, **(model or {}))


def infer(worker: Any, samples: Sequence[Sample], **flags: Any) -> Any:
    """Return the outputs of a worker's forward without a loss, as for old log-probs and the reference policy."""
    from verl.utils import tensordict_utils as tu

    batch = ppo_batch(samples)
    tu.assign_non_tensor(batch, compute_loss=False, **flags)
    return worker.infer_batch(batch)


def watched_gradients(worker: Any, steps: bool = True) -> dict[str, torch.Tensor]:
    """Return a dict that each step fills with the whole gradients, by name: ``train_mode`` drops them when it ends.

    Args:
        steps: whether the optimizer then steps.
    """
    seen: dict[str, torch.Tensor] = {}
    optimizer, module = worker.engine.optimizer, worker.engine.module
    step = optimizer.step

    def watching(*arguments: Any) -> Any:
        seen.update({name: grad for name, grad in whole_gradients(module).items() if grad is not None})
        return step(*arguments) if steps else None

    optimizer.step = watching
    return seen


@torch.no_grad()
def plain_log_probs(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of all tokens but the first, and the entropies of all predictions."""
    every = (model(input_ids=ids[None], use_cache=False).logits[0] / 0.7).log_softmax(-1)
    return every[:-1].gather(-1, ids[1:, None])[:, 0], -(every.exp() * every).sum(-1)


def reference_update(model: nn.Module, samples: Sequence[Sample]) -> float:
    """The loss of the plain model, one sample at a time; the gradients are left in its parameters."""
    loss = plain_ppo_loss(samples, [model(input_ids=ids[None], use_cache=False).logits[0] for ids, *_ in samples])
    loss.backward()
    return loss.item()


def of_this_rank(worker: Any, samples: Sequence[Any]) -> Sequence[Any]:
    """Return this rank's samples by verl's dispatch: ranks that share rows get the same."""
    rank, each = worker.engine.get_data_parallel_rank(), len(samples) // worker.engine.get_data_parallel_size()
    return samples[rank * each : (rank + 1) * each]


def check_ppo_updates(
    folder: Path, cases: Sequence[dict[str, Any]], attention: str = "sdpa", optimizer: Mapping[str, Any] | None = None
) -> None:
    """On each rank: log-probs, loss, gradients, norm and parameters of an update are the plain model's.

    Args:
        cases: arguments of ``ppo_worker``.
        attention: of both, as transformers calls it.
        optimizer: what torch's AdamW takes besides the learning rate, of both.
    """
    from verl.utils import tensordict_utils as tu
    from verl.workers.config.optimizer import build_optimizer

    samples, reference = ppo_samples(), reference_model(folder, attention)
    log_probs = [plain_log_probs(reference, ids)[0] for ids, *_ in samples]
    loss = reference_update(reference, samples)
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}  # not an indexer's
    wanted_norm = torch.nn.utils.get_total_norm(wanted.values()).item()
    build_optimizer(reference.parameters(), optimizer_config(**(optimizer or {}))).step()

    for settings in cases:
        where = str(settings)
        model = {"override_config": {"attn_implementation": attention}, **settings.get("model", {})}
        worker = ppo_worker(folder, **{"optimizer": optimizer, **settings, "model": model})
        mine = of_this_rank(worker, samples)

        output = infer(worker, mine)
        if worker.engine.is_mp_src_rank_with_outputs():
            wanted_here = of_this_rank(worker, log_probs)
            for want, got in zip(wanted_here, tu.get(output, "log_probs").unbind(), strict=True):
                torch.testing.assert_close(got[:-1], want.to(got.dtype), rtol=1e-5, atol=1e-5)

        seen = watched_gradients(worker)
        output = worker.train_batch(ppo_batch(mine))
        after = whole_parameters(worker.engine.module)
        assert seen.keys() == wanted.keys(), where
        for found, expected in ((seen, wanted), (after, dict(reference.named_parameters()))):
            for name, want in expected.items():
                error = relative_error(found[name], want.detach())
                assert error < _RELATIVE, (where, name, error)
        assert all(p.grad is None for p in worker.engine.module.parameters())
        if worker.engine.is_mp_src_rank_with_outputs():
            metrics = tu.get(output, "metrics")
            assert abs(metrics["grad_norm"] / wanted_norm - 1) < _RELATIVE, where
            assert abs(metrics["loss"] - loss) < 1e-5 * abs(loss) + 1e-6, where


def check_ppo_updates_in_float64(*arguments: Any) -> None:
    """``check_ppo_updates`` of families whose gradients in float32 are about 1e-5 off those in float64.

    Args:
        arguments: as there; the folder's model is saved in float64.
    """
    with float64():
        check_ppo_updates(*arguments)
