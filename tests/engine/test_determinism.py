"""Two runs of a step are equal to the last bit, under torch's deterministic mode, which none of our ops breaks."""

import warnings

import torch
import torch.distributed as dist

from tests.parity import families
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import VOCAB, token_loss
from tests.support.ranks import run_ranks

WORLD = 4
CASES = [
    (2, -1, {"checkpointing": "full"}),
    (4, -1, {"checkpointing": "selective", "param_dtype": torch.bfloat16}),
    (2, 2, {"param_dtype": torch.bfloat16}),
]


def _gradients(folder, ep, fsdp_size, options):
    model, _ = sharded_model(folder, WORLD, ep, fsdp_size, attention="eager", **options)
    model.train()
    ids = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):  # accumulated
        token_loss(model, ids).backward()
    return {name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None}


def _equal_twice(folders):
    torch.use_deterministic_algorithms(True)
    for folder in folders:
        for ep, fsdp_size, options in CASES:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*deterministic.*")
                first, second = (_gradients(folder, ep, fsdp_size, options) for _ in range(2))
            for name, grad in first.items():
                assert torch.equal(grad, second[name]), (ep, fsdp_size, options, name)


def test_training_run_twice_is_equal_bit_for_bit(tmp_path):
    # Biased, transposed and interleaved experts; routing in groups with a correction bias.
    run_ranks(_equal_twice, WORLD, [families.save(name, tmp_path / name) for name in ("gpt_oss", "glm4_moe")])
