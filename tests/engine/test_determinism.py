"""Two runs of a step are equal to the last bit, under torch's deterministic mode, which none of our ops breaks."""

import warnings

import torch
import torch.distributed as dist

from tests.parity import families
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import VOCAB, token_loss
from tests.support.ranks import run_ranks

WORLD = 4
# Biased, transposed and interleaved experts; routing in groups with a correction bias.
CASES = [
    ("gpt_oss", 2, -1, {"checkpointing": "full"}),
    ("gpt_oss", 2, 2, {"param_dtype": torch.bfloat16}),
    ("glm4_moe", 4, -1, {"checkpointing": "selective", "param_dtype": torch.bfloat16}),
]


def _gradients(folder, ep, fsdp_size, options):
    model, _ = sharded_model(folder, WORLD, ep, fsdp_size, attention="eager", **options)
    model.train()
    ids = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):  # accumulated
        token_loss(model, ids).backward()
    return {name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None}


def _equal_twice(root):
    torch.use_deterministic_algorithms(True)
    for name, *case in CASES:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*deterministic.*")
            first, second = (_gradients(root / name, *case) for _ in range(2))
        for fqn, grad in first.items():
            assert torch.equal(grad, second[fqn]), (name, case, fqn)


def test_training_run_twice_is_equal_bit_for_bit(tmp_path):
    for name, *_ in CASES:
        families.save(name, tmp_path / name)
    run_ranks(_equal_twice, WORLD, tmp_path)
