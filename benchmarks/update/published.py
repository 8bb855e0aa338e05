"""``recipes.plan``'s seconds beside figures that others published of real GPUs; writes results/published.md.

Rows are of training in bfloat16 with FSDP, with or without expert parallelism, whose batch, mesh and recomputation are
published too. The rates of the roofline are those of kernels that were measured on an H100 (gpu.md), but for
attention's, which were not measured there: its share is fitted on every other row, and the rest is predicted with it.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from benchmarks.machine import machine
from benchmarks.tables import rows_of, write_table
from epfsdp2.engine.planner.traffic import Collective, collectives
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.recipes.plan.cards import config_of
from epfsdp2.recipes.plan.cli import parse, request_of
from epfsdp2.recipes.plan.meshes import Request
from epfsdp2.recipes.plan.roofline import Cluster, roofline

AUTOMODEL = "[Automodel](https://github.com/NVIDIA-NeMo/Automodel/blob/main/docs/performance-summary.mdx)"
TORCHTITAN = "[torchtitan](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)"
PRIME_RL = "[prime-rl](https://github.com/PrimeIntellect-ai/prime-rl/blob/main/benchmarks/results/BENCHMARKS.md)"
LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
LLAMA_8B = LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA_70B = LLAMA | {
    **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
QWEN3_4B = {
    **{"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "head_dim": 128},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True},
}
# torchtitan's H100s have HBM2e and 500 W; "the actual peak is between SXM and NVL", of which this is the latter's.
GRAND_TETON = {"hbm": 2400.0, "tflops": 835.0}
H200 = {"hbm": 4800.0, "gib": 141.0}
GRID = [x / 100 for x in range(10, 41)]  # shares of the published rate that attention reaches


@dataclass(frozen=True)
class Published:
    """A published figure.

    Args:
        model: a card's name, or a config.
        sequences: of a micro-batch of a data-parallel rank.
        recomputed: whether layers are computed again in backward.
        sp: ranks that share a sequence.
        rate: tokens per second of a GPU.
    """

    name: str
    source: str
    model: str | dict[str, Any]
    gpus: int
    ep: int
    sequences: int
    length: int
    micro_batches: int
    recomputed: bool
    rate: float
    sp: int = 1
    card: str = "H100"

    @property
    def cluster(self) -> Cluster:
        facts = {"H200": H200, "H100, 500 W": GRAND_TETON}.get(self.card, {})
        return Cluster(nodes=math.ceil(self.gpus / 8), gpus=min(self.gpus, 8), **facts)

    def config(self) -> PretrainedConfig:
        if isinstance(self.model, str):
            return config_of(self.model)
        return AutoConfig.for_model(**self.model)


ROWS = [
    Published("Qwen3-30B-A3B", AUTOMODEL, "Qwen3-30B-A3B", 8, 8, 4, 4096, 16, True, 12_040),
    Published("gpt-oss-20b", AUTOMODEL, "gpt-oss-20b", 8, 8, 2, 4096, 16, True, 13_058),
    Published("Llama 3 70B", AUTOMODEL, LLAMA_70B, 64, 1, 1, 8192, 4, True, 866.77, sp=2),
    Published("gpt-oss-120b", AUTOMODEL, "gpt-oss-120b", 64, 64, 2, 4096, 4, False, 7_626),
    Published("Llama 3.1 8B", TORCHTITAN, LLAMA_8B, 8, 1, 2, 8192, 1, False, 6_667, card="H100, 500 W"),
    Published("Llama 3.1 8B", TORCHTITAN, LLAMA_8B, 128, 1, 2, 8192, 1, False, 6_514, card="H100, 500 W"),
    Published("Qwen3-4B", PRIME_RL, QWEN3_4B, 8, 1, 1, 16384, 2, True, 53_140 / 8, card="H200"),
    Published("Qwen3-4B", PRIME_RL, QWEN3_4B, 8, 1, 1, 16384, 2, True, 49_720 / 8),
    Published("Qwen3-30B-A3B, no EP", PRIME_RL, "Qwen3-30B-A3B", 8, 1, 1, 16384, 2, True, 35_030 / 8, card="H200"),
]


def predicted(row: Published, request: Request, **constants: float) -> float:
    """Tokens per second of a GPU."""
    batch = replace(request.batch, tokens=request.batch.tokens // row.sp, sp=row.sp)
    topology, cluster = Topology.arrange(row.gpus, row.ep), replace(row.cluster, **constants)
    moved = [_once_to_a_place(c, row) for c in collectives(request.sizes, topology, request.options, batch)]
    time = roofline(request.sizes, topology, request.options, batch, cluster, moved, row.length)
    return batch.tokens * batch.micro_batches / time.step


def _once_to_a_place(collective: Collective, row: Published) -> Collective:
    """DeepEP, which Automodel's rows have, sends a token once to a rank of its node, and once to another node."""
    if collective.name != "all-to-all tokens":
        return collective
    places, experts = row.cluster.nodes if row.ep > 8 else row.ep, row.config().num_experts_per_tok
    reached = (places - 1) * (1 - (1 - 1 / places) ** experts)  # other places that a token goes to
    return replace(collective, nbytes=int(collective.nbytes * reached / (experts * (1 - 1 / places))))


def request(row: Published, *settings: str) -> Request:
    """What the plan is asked for a row; published runs have a gate that is balanced."""
    words = ["--model", row.name, "--tokens", str(row.sequences * row.length), "--sequences", str(row.sequences)]
    words += ["--micro-batches", str(row.micro_batches), "--imbalance", "1"]
    words += [f"engine.activation_checkpointing={'full' if row.recomputed else 'none'}", *settings]
    return request_of(parse(words), row.config())


def fit(rows: Sequence[tuple[Published, Request]]) -> float:
    """Attention's share with the least squares of the logarithms of predicted over published."""

    def squares(share: float) -> float:
        return sum(math.log(predicted(row, asked, attention=share) / row.rate) ** 2 for row, asked in rows)

    return min(GRID, key=squares)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    asked = [(row, request(row)) for row in ROWS]
    halves = [asked[::2], asked[1::2]]
    fitted, of_all = [fit(half) for half in halves], fit(asked)
    rows = []
    for number, (row, of_row) in enumerate(asked):
        kept_out = predicted(row, of_row, attention=fitted[1 - number % 2]) / row.rate
        rows.append(
            {
                **{"name": row.name, "gpus": row.gpus, "card": row.card, "ep": row.ep, "published": row.rate},
                **{"kept_out": kept_out, "fitted": predicted(row, of_row, attention=of_all) / row.rate},
            }
        )
    off = [abs(row["kept_out"] - 1) for row in rows]
    eager = predicted(ROWS[0], request(ROWS[0], "engine.fuse_dense=false"), attention=of_all)
    result = {"machine": machine(), "rows": rows, "halves": fitted, "attention": of_all, "error": max(off)}
    result["eager"] = eager
    cells = [
        [
            f"{row.name}, {row.source}",
            f"{row.gpus} x {row.card}",
            f"ep {row.ep}, sp {row.sp}; {row.micro_batches} x {row.sequences} x {row.length:,}"
            + (", recomputed" if row.recomputed else ""),
            f"{row.rate:,.0f}",
            f"{found['kept_out'] * row.rate:,.0f}",
            f"{found['kept_out'] - 1:+.0%}",
            f"{found['fitted'] - 1:+.0%}",
        ]
        for row, found in zip(ROWS, rows, strict=True)
    ]
    text = [
        "Tokens per second of a GPU. The rates of products and of passes over memory are those of kernels that were "
        "measured on an H100 ([gpu.md](gpu.md)); none is fitted here. The share of the matrix rate that attention "
        "reaches was not measured. Each row is predicted with a share that was fitted on the other half of the rows "
        f"(the first, third, ...: {fitted[0]:.2f}; the second, fourth, ...: {fitted[1]:.2f}). "
        f"The plan's own, {of_all:.2f}, is fitted on all: last column.",
        "",
        f"Of rows that it was not fitted on the prediction is off by {statistics.median(off):.0%} in the median and by "
        f"{max(off):.0%} at most.",
        "",
        f"The first row is predicted with fused norms and rotary embeddings, {rows[0]['fitted'] * ROWS[0].rate:,.0f} "
        f"with the plan's share. With transformers' eager ones (`engine.fuse_dense=false`) it would be {eager:,.0f}.",
    ]
    more = [
        "",
        "Whether layers were computed again is what the configs said when the figures appeared: Automodel's of "
        "gpt-oss-20b (79d0ccfd) and gpt-oss-120b (2c236e08) have changed since. prime-rl's runs have two "
        "micro-batches.",
        "",
        "Mesh: ep, ranks of a sequence (sp); then micro-batches x sequences x tokens. Not predicted: pipelines "
        '(DeepSeek-V3, Kimi-K2), FP8 and MXFP8, state spaces (Nemotron), adapters, and prime-rl\'s rows of "RL Full", '
        'which take two to six times as long as its "SFT Full" of the same tokens.',
    ]
    made_by = "python -m benchmarks.update.published"
    columns = ["model", "GPUs", "mesh and batch", "published", "predicted", "off", "off, fitted on all"]
    heading = "The plan's seconds beside published figures"
    write_table("published", result, heading, made_by, "Computed, not timed", text, columns, cells, more)
    print("\n".join(text + rows_of(columns, cells)))


if __name__ == "__main__":
    main()
