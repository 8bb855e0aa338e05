"""The quickstart's task: sums of two digits, an answer that a program can check, and data made from a seed.

The policy first learns from labels of which a share is wrong, so what it samples is right only about as often as the
labels were. GRPO then has something to sharpen: the right answer is the most likely one, but not yet the habit.
"""

import random
from pathlib import Path

import pandas as pd

__all__ = ["DATA_SOURCE", "compute_score", "grpo_rows", "problems", "warmup_rows", "write_datasets"]

DATA_SOURCE = "epfsdp2/one_digit_sums"


def problems() -> list[tuple[str, str]]:
    """Return all 100 questions with their answers, as ``("7+5=", "12")``."""
    return [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_settings) -> float:
    """Return 1.0 where the response is exactly the answer, else 0.0; verl's signature of a custom reward function.

    Raises:
        ValueError: for data that is not this task's.
    """
    if data_source != DATA_SOURCE:
        raise ValueError(f"data_source={data_source!r}: this reward function scores {DATA_SOURCE!r} only")
    return float(solution_str == str(ground_truth))


def warmup_rows(seed: int, copies: int, right_share: float) -> list[dict]:
    """Make ``copies`` conversations per question, in random order; a label is right with probability ``right_share``.

    A wrong label is one of the other sums that occur, each as likely as the next, so that no wrong answer comes near
    the right one's share.
    """
    if not 0.0 < right_share <= 1.0:
        raise ValueError(f"right_share={right_share}: has to be in (0, 1], for example 0.4")
    rng, sums = random.Random(seed), [str(s) for s in range(19)]
    rows = []
    for question, answer in problems() * copies:
        label = answer if rng.random() < right_share else rng.choice([s for s in sums if s != answer])
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": label}]})
    rng.shuffle(rows)
    return rows


def grpo_rows(seed: int) -> list[dict]:
    """Return every question once, in random order, in the columns of verl's RLHF dataset."""
    order = problems()
    random.Random(seed).shuffle(order)
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index},
        }
        for index, (question, answer) in enumerate(order)
    ]


def write_datasets(folder: Path, seed: int, copies: int, right_share: float) -> None:
    """Write ``warmup.parquet`` and ``grpo.parquet`` to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(warmup_rows(seed, copies, right_share)).to_parquet(folder / "warmup.parquet")
    pd.DataFrame(grpo_rows(seed)).to_parquet(folder / "grpo.parquet")
