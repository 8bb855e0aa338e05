"""Sums of two digits: data from a seed, and an answer that a program can check.

A share of the warm-up's labels is wrong, so the model answers right about as often as its labels. The right answer is
the most likely one, and GRPO can reinforce it.
"""

import random
from pathlib import Path

import pandas as pd

__all__ = ["PROBLEMS", "compute_score", "grpo_rows", "warmup_rows", "write_datasets"]

# All 100 questions with their answers.
PROBLEMS = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_settings) -> float:
    """Return 1.0 if the response is exactly the answer, else 0.0; the signature is verl's."""
    return float(solution_str == str(ground_truth))


def warmup_rows(seed: int, copies: int, right_share: float) -> list[dict]:
    """Return shuffled conversations, ``copies`` per question; a label is right with probability ``right_share``."""
    rng, sums, rows = random.Random(seed), [str(s) for s in range(19)], []
    for question, answer in PROBLEMS * copies:
        label = answer if rng.random() < right_share else rng.choice([s for s in sums if s != answer])
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": label}]})
    rng.shuffle(rows)
    return rows


def grpo_rows(seed: int) -> list[dict]:
    """Return every question once, shuffled, in the columns of verl's RLHF dataset."""
    order = list(PROBLEMS)
    random.Random(seed).shuffle(order)
    return [
        {
            "data_source": "epfsdp2/one_digit_sums",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index},
        }
        for index, (question, answer) in enumerate(order)
    ]


def write_datasets(folder: Path, seed: int, copies: int, right_share: float) -> None:
    """Write ``warmup.parquet`` and ``grpo.parquet``."""
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(warmup_rows(seed, copies, right_share)).to_parquet(folder / "warmup.parquet")
    pd.DataFrame(grpo_rows(seed)).to_parquet(folder / "grpo.parquet")
