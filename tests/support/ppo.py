"""PPO updates through verl's own TrainingWorker: samples, the batch that verl makes of them, an actor."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .models import VOCAB
from .verl_worker import training_worker

__all__ = ["PROMPT", "RESPONSE", "SAMPLES", "ppo_batch", "ppo_samples", "ppo_worker"]

SAMPLES, PROMPT, RESPONSE = 16, 5, 9

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


def ppo_batch(samples: Sequence[Sample], of_all_ranks: int = SAMPLES, prompt: int = PROMPT, response: int = RESPONSE):
    """verl's no-padding batch of some samples, which are a part of so many."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    n, width = len(samples), prompt + response
    data = {
        "input_ids": torch.zeros(n, width, dtype=torch.long),
        "attention_mask": torch.zeros(n, width, dtype=torch.long),
        "position_ids": torch.zeros(n, width, dtype=torch.long),
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
        data["position_ids"][i, start : start + len(ids)] = torch.arange(len(ids))
        data["prompts"][i, start:] = ids[:before]
        data["responses"][i, :after] = ids[before:]
        data["response_mask"][i, :after] = 1
        data["old_log_probs"][i, :after] = old
        data["advantages"][i, :after] = advantage
    batch = left_right_2_no_padding(TensorDict(data, batch_size=[n]))
    tu.assign_non_tensor(batch, global_batch_size=of_all_ranks, temperature=0.7, calculate_entropy=True)
    return batch


def ppo_worker(
    folder: Path,
    ep: int,
    fsdp_size: int = -1,
    dynamic: bool = False,
    micro_batch: int = 2,
    of_model: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """An actor in float32; ``settings`` are the engine's, ``of_model`` those of verl's model node."""
    from verl.workers.utils.losses import ppo_loss

    from epfsdp2.engine.config import EPFSDP2ActorConfig, EPFSDP2EngineConfig

    engine = EPFSDP2EngineConfig(
        ep_size=ep,
        fsdp_size=fsdp_size,
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        use_dynamic_bsz=dynamic,
        max_token_len_per_gpu=40,
        infer_max_token_len_per_gpu=40,
        micro_batch_size_per_gpu=micro_batch,
        infer_micro_batch_size_per_gpu=micro_batch,
        **settings,
    )
    actor = EPFSDP2ActorConfig(
        engine=engine, rollout_n=1, ppo_micro_batch_size_per_gpu=micro_batch, entropy_coeff=0.01, clip_ratio_c=3.0
    )
    return training_worker(folder, "language_model", engine, partial(ppo_loss, config=actor), of_model=of_model)
