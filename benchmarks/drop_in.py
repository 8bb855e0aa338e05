"""The same runs by verl's own fsdp2 engine and by ``engine=epfsdp2``: what their steps log.

    python -m benchmarks.drop_in [--steps 5] [--cases GRPO dense ...]

runs ``verl.trainer.main_ppo`` with SGLang on a CPU (``make setup STACK=sglang``), every engine from the same checkpoint
and seeds, and writes ``benchmarks/results/drop_in.json`` and ``drop_in.md``. Rollouts are the same as long as the
weights are: there is one replica, and it answers one request at a time.
"""

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from benchmarks.quickstart import machine
from benchmarks.tables import newest, write_table
from tests.e2e.runs import HOOKS, Run, overrides, running
from tests.support.models import save_dense_beside

STOCK = "verl fsdp2"
BOUND = 1e-5
_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_ONE_BY_ONE = (
    f"{_ROLLOUT}.tensor_model_parallel_size=2",
    f"+{_ROLLOUT}.engine_kwargs.sglang.random_seed=1",
    f"{_ROLLOUT}.agent.agent_loop_config_path={HOOKS / 'one_by_one.yaml'}",
    f"{_ROLLOUT}.agent.default_agent_loop=one_by_one",
)


@dataclass(frozen=True)
class Case:
    """The quickstart's GRPO with these settings, in which ``{critic}`` is a checkpoint with one value per token.

    Attributes:
        roles: those that an engine computes.
        dense: whether the actor has no experts.
    """

    settings: tuple[str, ...] = ()
    roles: tuple[str, ...] = ("actor",)
    dense: bool = False


CASES = {
    "GRPO": Case(),
    "KL loss": Case(
        (
            f"{_ACTOR}.use_kl_loss=True",
            f"{_ACTOR}.kl_loss_coef=0.01",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32",
        ),
        ("actor", "ref"),
    ),
    "dynamic batches": Case(
        (
            f"{_ACTOR}.use_dynamic_bsz=True",
            f"{_ACTOR}.ppo_max_token_len_per_gpu=256",
            f"{_ROLLOUT}.log_prob_use_dynamic_bsz=True",
            f"{_ROLLOUT}.log_prob_max_token_len_per_gpu=256",
        )
    ),
    "PPO with a critic": Case(
        (
            "algorithm.adv_estimator=gae",
            "critic.model.path={critic}",
            "+critic.model.override_config.attn_implementation=sdpa",
            "critic.model.use_remove_padding=True",
            "critic.model.enable_gradient_checkpointing=False",
            "critic.ppo_micro_batch_size_per_gpu=32",
            "critic.optim.lr=1e-3",
        ),
        ("actor", "critic"),
    ),
    # Its answers are all wrong: the entropy moves it.
    "dense": Case((f"{_ACTOR}.entropy_coeff=0.01",), dense=True),
}
LOGGED = {
    "reward": "critic/score/mean",
    "length": "response_length/mean",
    "loss": "actor/pg_loss",
    "entropy": "actor/entropy",
    "gradient norm": "actor/grad_norm",
    "KL loss": "actor/kl_loss",
    "value loss": "critic/vf_loss",
    "critic's gradient norm": "critic/grad_norm",
    "train/rollout difference": "training/rollout_probs_diff_mean",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="steps of a run")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], help="which runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = save_models(_warmed_up(folder), folder)
        rows = []
        for name in options.cases:
            for side in (STOCK, *(("ep 1",) if CASES[name].dense else ("ep 1", "ep 2"))):
                steps = logged(name, side, models, folder, options.steps)
                rows.append({"run": f"{name}, {side}", "case": name, "side": side, "steps": steps})
                print(rows[-1]["run"], steps[0], flush=True)
    runs = newest("drop_in", "runs", "run", rows)
    return write({"machine": machine(), "runs": [*runs.values()]})


def _warmed_up(folder: Path) -> Path:
    """The checkpoint of the quickstart's warm-up."""
    run = _run(folder / "warmup", "--steps", "2")
    (warm,) = (run.output / "warmup").glob("global_step_*/huggingface")
    return warm


def save_models(experts: Path, folder: Path) -> dict[str, Path]:
    """A critic of the model with experts, and a dense model, both with its tokenizer."""
    torch.manual_seed(1)
    critic = AutoModelForTokenClassification.from_pretrained(experts, num_labels=1, dtype=torch.float32)
    critic.save_pretrained(folder / "critic")
    AutoTokenizer.from_pretrained(experts).save_pretrained(folder / "critic")
    dense = save_dense_beside(experts, folder / "dense")
    return {"experts": experts, "critic": folder / "critic", "dense": dense}


def _run(output: Path, *words: str, program: tuple[str, ...] = ("epfsdp2.recipes.quickstart",)) -> Run:
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with running(output, "--rollout", "sglang", *words, program=program, environment=environment) as run:
        run.wait()
    return run


def logged(name: str, side: str, models: dict[str, Path], folder: Path, steps: int) -> list[dict[str, float]]:
    """What each step of a run logs, of ``LOGGED``.

    Raises:
        RuntimeError: it has not made its steps.
    """
    case = CASES[name]
    settings = [*_ONE_BY_ONE, *(setting.format(critic=models["critic"]) for setting in case.settings)]
    words = ["--model", str(models["dense" if case.dense else "experts"]), "--steps", str(steps)]
    output = folder / f"{name} {side}".replace(" ", "_")
    if side == STOCK:
        run = _run(output, *words, *overrides(*settings), program=("stock_engine", ",".join(case.roles)))
    else:
        run = _run(output, *words, *overrides(f"engine.ep_size={side.split()[1]}", *settings))
    found = [step for step in run.steps() if LOGGED["reward"] in step]
    if len(found) != steps:
        raise RuntimeError(f"{name}, {side}: {len(found)} of {steps} steps:\n{run.text()[-3000:]}")
    return [{word: step[key] for word, key in LOGGED.items() if step.get(key) is not None} for step in found]


def difference(wanted: dict[str, float], got: dict[str, float]) -> float:
    """The largest difference of what a step logs: relative, and absolute of what is smaller than one.

    Raises:
        KeyError: ``got`` lacks one.
    """
    return max(abs(got[word] - value) / max(1.0, abs(value)) for word, value in wanted.items())


def write(result: dict) -> int:
    by = {(run["case"], run["side"]): run["steps"] for run in result["runs"]}
    cells, worst = [], 0.0
    for (name, side), steps in by.items():
        first = steps[0]
        figures = [f"{first[word]:.7g}" if word in first else "" for word in [*LOGGED][:-1]]
        differences = []
        if side != STOCK:
            differences = [difference(*pair) for pair in zip(by[name, STOCK], steps, strict=True)]
            worst = max(worst, differences[0])
        shown = [f"{differences[0]:.0e}", f"{max(differences):.0e}"] if differences else ["", ""]
        cells.append([name, side, *figures, *shown])
    where = result["machine"]
    versions = ", ".join(f"{name} {where['versions'][name]}" for name in ("torch", "verl", "sglang"))
    write_table(
        "drop_in",
        result,
        "The same runs by verl's fsdp2 engine and by this one",
        "make bench-drop-in",
        f"{where['cpu']}, {where['cores']} cores; {versions}",
        [
            "`verl.trainer.main_ppo` on two ranks with SGLang, float32, from one checkpoint and one seed: what the "
            "first step logs. Differences are from verl's fsdp2, the largest of what a step logs (relative, absolute "
            f"of what is smaller than 1; bound of the first step: {BOUND:.0e}); of later steps the largest. One "
            "sampled token that differs changes all after it.",
        ],
        ["run", "engine", *[*LOGGED][:-1], "difference, first step", "all steps"],
        cells,
    )
    return 0 if worst <= BOUND and math.isfinite(worst) else 1


if __name__ == "__main__":
    raise SystemExit(main())
