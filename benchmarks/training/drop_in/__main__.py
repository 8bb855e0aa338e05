"""The same runs of verl's trainer with its own fsdp2 engine and with this one, and how far they are apart.

    python -m benchmarks.training.drop_in [CASE ...] [--steps 5]

on the stack ``sglang`` (``make bench-drop-in STACK=sglang``): ``main_ppo`` from one checkpoint and one seed, in
float32, on two ranks with two replicas of real SGLang; once as verl comes, then with ``engine=epfsdp2``. Samples are
functions of their prompts and numbers (``seeds.py``), so that both runs generate the same from the same probabilities.
Writes ``benchmarks/results/drop_in.json`` and ``drop_in.md``; cases of an earlier run that were not run again stay.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from benchmarks.machine import machine
from benchmarks.tables import ROOT, newest, write_table
from epfsdp2.recipes.quickstart import task
from epfsdp2.recipes.quickstart.model import build_model, build_tokenizer

_HERE = "benchmarks.training.drop_in"
BOUND = 1e-5
# What verl logs of a step, by what is compared: a difference over the stock figure, or the difference itself where the
# figure is near zero. Means of micro-batches' means (``critic/vpred_mean``) depend on the order of answers.
RELATIVE = ("actor/grad_norm", "actor/entropy", "critic/grad_norm")
ABSOLUTE = (
    *("actor/loss", "actor/pg_loss", "actor/ppo_kl", "actor/kl_loss", "critic/score/mean", "critic/rewards/mean"),
    *("critic/advantages/max", "critic/advantages/min", "response_length/mean"),
    *("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"),
    *("critic/vf_loss", "critic/values/mean", "critic/values/max", "critic/values/min"),
)
_ROLLOUT = "actor_rollout_ref.rollout"
_PPO = [
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
    "+critic.model.override_config.attn_implementation=sdpa",
    "critic.model.use_remove_padding=True",
    "critic.model.enable_gradient_checkpointing=False",
    "critic.model.path=$critic",
    "critic.optim.lr=1e-3",
    # Batches of as many sequences as 256 tokens hold.
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
    "critic.ppo_max_token_len_per_gpu=256",
]


@dataclass(frozen=True)
class Case:
    """Runs that are compared.

    Args:
        model: ``moe`` or ``dense``.
        ep_sizes: expert-parallel sizes of the runs beside verl's.
        settings: of both engines; ``$critic`` is a critic of the actor's kind.
    """

    model: str
    ep_sizes: list[int]
    settings: list[str] = field(default_factory=list)


CASES = {
    "GRPO, 16 experts": Case("moe", [1, 2]),
    "GRPO, dense": Case("dense", [1]),
    "PPO, 16 experts: critic, KL loss, dynamic batches": Case("moe", [2], _PPO),
}
COLUMNS = ["run", "engine", "figures", "first step, largest difference", "of", "all steps, largest difference", "of"]
COLUMNS += ["processor", "commit"]


def write_model(folder: Path, kind: str) -> Path:
    """Save a model that answers about half of the questions, so that GRPO has a gradient."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=1)
    if kind == "dense":
        from transformers import Qwen3Config, Qwen3ForCausalLM

        own = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
        own += ("num_key_value_heads", "max_position_embeddings", "initializer_range", "pad_token_id", "eos_token_id")
        sizes = {name: getattr(model.config, name) for name in own}
        generation = model.generation_config
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=False, dtype="float32"))
        model.generation_config = generation
    rows = task.warmup_rows(1, copies=40, right_share=0.6)
    random.Random(1).shuffle(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for batch in _batches(rows, 64):
        texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in batch]
        tokens = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
        labels = tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100)
        model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_critic(folder: Path, model: Path) -> Path:
    """Save a critic that begins as ``model`` with a value head."""
    torch.manual_seed(2)
    critic = AutoModelForTokenClassification.from_pretrained(model, num_labels=1)
    critic.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def _batches(rows: list[dict], size: int) -> Iterator[list[dict]]:
    return (rows[first : first + size] for first in range(0, len(rows) - size + 1, size))


def run(side: str, folder: Path, model: Path, steps: int, settings: list[str]) -> list[dict]:
    """Run verl's trainer once; return what it logged of each step.

    Args:
        side: ``stock``, or ``ep 1`` and the like.
        settings: of verl, beside the quickstart's.

    Raises:
        RuntimeError: it has not made its steps.
    """
    plugins = _plugin(folder / "plugins")
    output = folder / side.replace(" ", "_")
    settings = [*settings, f"{_ROLLOUT}.agent.agent_loop_config_path={plugins / 'agents.yaml'}"]
    settings.append(f"{_ROLLOUT}.agent.default_agent_loop=seeded")
    if side == "stock":
        settings.append(f"actor_rollout_ref.model.external_lib={_HERE}.stock_on_cpu")
    else:
        settings.append(f"engine.ep_size={side.removeprefix('ep ')}")
    command = [sys.executable, "-m", f"{_HERE}.run", side.split()[0], "--rollout", "sglang", "--output", str(output)]
    command += ["--model", str(model), "--steps", str(steps), "--lr", "1e-4"]
    command += [f"--override={setting}" for setting in settings]
    environment = os.environ | {"PYTHONPATH": f"{plugins}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    if side == "stock":  # verl registers its engine for accelerators alone
        environment["VERL_ENGINE_DEVICE"] = "cuda"
    # Its exit status also says whether the reward rose, which few steps do not show.
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    path = output / "metrics.jsonl"
    logged = [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.exists() else []
    logged = [step for step in logged if "actor/grad_norm" in step]
    if len(logged) != steps:
        raise RuntimeError(f"{side} made {len(logged)} of {steps} steps:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    return logged


def _plugin(folder: Path) -> Path:
    """Write what SGLang and verl find ``seeds.py`` by: a distribution with an entry point, and a list of agents."""
    found = folder / "drop_in-0.dist-info"
    found.mkdir(parents=True, exist_ok=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: drop-in\nVersion: 0\n")
    (found / "entry_points.txt").write_text(f"[sglang.srt.plugins]\ndrop_in = {_HERE}.seeds:install\n")
    (folder / "agents.yaml").write_text(f"- name: seeded\n  _target_: {_HERE}.seeds.SeededAgentLoop\n")
    return folder


def compare(stock: list[dict], ours: list[dict]) -> dict[str, list[float]]:
    """Return, for each figure that both logged, how far they are apart in each step.

    Raises:
        ValueError: a figure that only one side logged.
    """
    apart = {}
    for name in (*RELATIVE, *ABSOLUTE):
        logs = [name in step for step in (*stock, *ours)]
        if any(logs) and not all(logs):
            raise ValueError(f"{name} was logged in some steps only: {logs}")
        if all(logs):
            pairs = [(one[name], other[name]) for one, other in zip(stock, ours, strict=True)]
            apart[name] = [abs(a - b) / (abs(a) if name in RELATIVE else 1.0) for a, b in pairs]
    return apart


def _cells(row: dict) -> list[str]:
    cells = [row["case"], row["side"], str(len(row["apart"]))]
    for steps in (1, None):
        most = {name: max(values[:steps]) for name, values in row["apart"].items()}
        name = max(most, key=lambda key: most[key])
        cells += [f"{most[name]:.1e}", f"`{name}`"]
    return [*cells, row["cpu"], row["commit"][:9]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(map(repr, CASES))}")
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()
    if unknown := set(asked.cases) - CASES.keys():
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    rows = []
    for case in asked.cases or CASES:
        asks = CASES[case]
        with tempfile.TemporaryDirectory() as one:
            folder = Path(one)
            model = write_model(folder / "model", asks.model)
            critic = write_critic(folder / "critic", model)
            settings = [setting.replace("$critic", str(critic)) for setting in asks.settings]
            stock = run("stock", folder, model, asked.steps, settings)
            for ep in asks.ep_sizes:
                side = f"ep {ep}"
                ours = run(side, folder, model, asked.steps, settings)
                rows.append({"row": f"{case}, {side}", "case": case, "side": side, "apart": compare(stock, ours)})
                rows[-1] |= {"stock": _shown(stock), "ours": _shown(ours)}
                rows[-1] |= {name: machine()[name] for name in ("cpu", "commit")}
                print(_cells(rows[-1]), flush=True)
                _write(rows, asked.steps)
    return int(any(values[0] > BOUND for row in rows for values in row["apart"].values()))


def _shown(steps: list[dict]) -> list[dict]:
    return [{name: step[name] for name in (*RELATIVE, *ABSOLUTE) if name in step} for step in steps]


def _write(rows: list[dict], steps: int) -> None:
    import sglang

    where = machine()
    found = newest("drop_in", "rows", "row", rows)
    order = [f"{case}, ep {ep}" for case, asks in CASES.items() for ep in asks.ep_sizes]
    kept = [found[name] for name in order if name in found]
    versions = where["versions"]
    write_table(
        "drop_in",
        {"machine": where, "sglang": sglang.__version__, "steps": steps, "rows": kept},
        "The same run with verl's engine and with this one",
        "make bench-drop-in STACK=sglang",
        f"{where['cores']} cores; torch {versions['torch']}, verl {versions['verl']}, SGLang {sglang.__version__}",
        [
            f"`main_ppo` from one checkpoint and seed, {steps} steps of 128 answers, float32, two ranks, real SGLang:",
            "verl's fsdp2 engine, then `engine=epfsdp2`. The largest difference of what both logged: of",
            f"{_names(RELATIVE)}",
            f"over verl's figure; of {_names(ABSOLUTE[:5])},",
            f"{_names(ABSOLUTE[5:9])},",
            f"{_names(ABSOLUTE[9:11])},",
            f"{_names(ABSOLUTE[11:])} itself.",
            f"Bound of the first step: {BOUND:.0e}.",
        ],
        COLUMNS,
        [_cells(row) for row in kept],
    )


def _names(figures: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in figures)


if __name__ == "__main__":
    raise SystemExit(main())
