"""Log-probs and entropies with the same bits on every mesh, for random lengths and divisions into rows."""

import itertools

import torch
import torch.distributed as dist

from epfsdp2.engine.fsdp.ulysses import SequenceParallel, gather_parts, own_part
from epfsdp2.engine.head.causal_head import CausalHead, Wanted
from epfsdp2.engine.moe.gemm.backends import ROWS
from epfsdp2.engine.packing.sequences import PackedSequences
from epfsdp2.engine.topology.mesh import Topology, build_sequence_mesh
from tests.parity import families
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import VOCAB
from tests.support.ranks import run_ranks

WORLD, SEQUENCES, ROWS_PER_RANK = 4, 8, 3
# Arguments of ``Topology.arrange`` after the ranks, ranks that share rows, and options.
MESHES = [
    ((1, -1, 1), 1, {"checkpointing": "full"}),
    ((2, 2, 1), 1, {"dispatch_chunks": 2, "reshard_after_forward": False}),
    ((4, -1, 1), 1, {"prefetch_depth": 2}),
    ((2, -1, 2), 1, {"expert_shard_dim": 1}),
    ((1, 2, 2), 1, {}),
    ((2, -1, 1), 2, {"checkpointing": "selective"}),
]
# Groups, shared experts and a correction bias; biases and interleaved experts; a state along the row.
FAMILIES = {
    "qwen3_moe": torch.float32,
    "deepseek_v3": torch.float16,
    "gpt_oss": torch.float32,
    "qwen3_next": torch.bfloat16,
}


def _model(name, folder, mesh, sp, dtype, **options):
    installed = {}

    def install(model):
        installed["head"] = CausalHead(model)
        packed = PackedSequences(model)
        if sp > 1:
            group = build_sequence_mesh("cpu", WORLD, sp).get_group("sp")
            SequenceParallel(model, group, packed, whole=True)
            installed["group"] = group

    options |= {"param_dtype": dtype, "batch_invariant": True, "before": install}
    model, _ = sharded_model(folder, Topology.arrange(WORLD, *mesh), attention=families.ALL[name].attention, **options)
    return model, installed["head"], installed.get("group")


def _log_probs(model, head, group, sequences, division):
    """Return ``[tokens, 2]`` for each sequence; ``division`` lists the sequences of each row."""
    found, size = {}, 1 if group is None else dist.get_world_size(group)
    for numbers in division:
        lengths = [len(sequences[i]) for i in numbers]
        lengths.append(-sum(lengths) % (ROWS * size))
        padding = torch.zeros(lengths[-1], dtype=torch.long)
        ids = torch.cat([*(sequences[i] for i in numbers), padding])[None]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        labels = own_part(ids.roll(-1), 1, group)
        head.wanted = Wanted(labels, torch.full(labels.shape, 0.7), with_entropy=True)
        output = model(
            input_ids=own_part(ids, 1, group), position_ids=positions, attention_mask=None, use_cache=False
        ).logits
        log_probs, entropies = head.take(output)
        whole = gather_parts(torch.stack((log_probs[0], entropies[0]), dim=-1), group)
        for number, part in zip(numbers, whole.split(lengths), strict=False):
            found[number] = part[:-1].detach()  # the last label is another sequence's
    return found


def _drawn(generator, sp):
    """Draw a division of the sequences into as many rows on each rank; ranks that share rows have the same."""
    seed = torch.randint(10**6, (), generator=generator).item() + dist.get_rank() // sp
    own = torch.Generator().manual_seed(seed)
    order = torch.randperm(SEQUENCES, generator=own).tolist()
    cuts = sorted((torch.randperm(SEQUENCES - 1, generator=own)[: ROWS_PER_RANK - 1] + 1).tolist())
    return [order[a:b] for a, b in itertools.pairwise([0, *cuts, SEQUENCES])]


def _equal_on_every_mesh(root, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, dtype in FAMILIES.items():
        folder = root / name
        lengths = torch.randint(2, 70, (SEQUENCES,), generator=generator).tolist()
        sequences = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]
        model, head, _ = _model(name, folder, (1, 1, 1), 1, dtype)  # a copy of the model on each rank
        with torch.no_grad():
            alone = _log_probs(model, head, None, sequences, [[i] for i in range(SEQUENCES)])
        for mesh, sp, options in MESHES:
            if sp > 1 and name == "gpt_oss":
                options = {**options, "checkpointing": "none"}
            model, head, group = _model(name, folder, mesh, sp, dtype, **options)
            model.train()
            found = _log_probs(model, head, group, sequences, _drawn(generator, sp))
            for number, wanted in alone.items():
                assert torch.equal(found[number], wanted), (seed, name, mesh, sp, options, number, lengths)


def test_log_probs_have_the_same_bits_on_every_mesh_and_in_every_row(tmp_path):
    for name in FAMILIES:
        families.save(name, tmp_path / name)
    run_ranks(_equal_on_every_mesh, WORLD, tmp_path, torch.seed() % 2**31, timeout=500)
