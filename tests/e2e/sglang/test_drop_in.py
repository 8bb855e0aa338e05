"""The same run with verl's fsdp2 engine and with this one: five steps log the same figures.

``main_ppo`` starts from one checkpoint and seed, in float32, on two ranks with two replicas of real SGLang. Samples are
functions of their prompts and numbers (``seeds.py``), so both runs generate the same from the same probabilities.
"""

import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from epfsdp2.recipes.quickstart import task
from epfsdp2.recipes.quickstart.model import build_model, build_tokenizer
from tests.e2e.runs import overrides

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed (make setup STACK=sglang)"),
]
ROOT = Path(__file__).parents[3]
_HERE, STEPS = "tests.e2e.sglang", 5
BOUND = 1e-5  # of the first step
# verl's figures of a step, compared by relative difference, or by the difference itself where the figure is near zero.
# Means of micro-batches' means (``critic/vpred_mean``) depend on the order of answers.
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


# The model, the expert-parallel sizes of the runs beside verl's, and settings of both engines.
CASES = {
    "GRPO, 16 experts": ("moe", [1, 2], []),
    "GRPO, dense": ("dense", [1], []),
    "PPO, 16 experts: critic, KL loss, dynamic batches": ("moe", [2], _PPO),
}


def _write_model(folder: Path, kind: str) -> Path:
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
    for first in range(0, len(rows) - 63, 64):
        batch = rows[first : first + 64]
        texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in batch]
        tokens = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
        labels = tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100)
        model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _write_critic(folder: Path, model: Path) -> Path:
    """Save a critic that begins as ``model`` with a value head."""
    torch.manual_seed(2)
    critic = AutoModelForTokenClassification.from_pretrained(model, num_labels=1)
    critic.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def _run(side: str, folder: Path, model: Path, settings: list[str]) -> list[dict]:
    """Run verl's trainer once; return its figures of each step. ``side`` is ``stock``, or ``ep 1`` and the like."""
    plugins = _plugin(folder / "plugins")
    output = folder / side.replace(" ", "_")
    settings = [*settings, f"{_ROLLOUT}.agent.agent_loop_config_path={plugins / 'agents.yaml'}"]
    settings.append(f"{_ROLLOUT}.agent.default_agent_loop=seeded")
    if side == "stock":
        settings.append(f"actor_rollout_ref.model.external_lib={_HERE}.stock_on_cpu")
    else:
        settings.append(f"engine.ep_size={side.removeprefix('ep ')}")
    command = [sys.executable, "-m", f"{_HERE}.drop_in_run", side.split()[0], "--rollout", "sglang"]
    command += ["--output", str(output), "--model", str(model), "--steps", str(STEPS), "--lr", "1e-4"]
    command += overrides(*settings)
    environment = os.environ | {"PYTHONPATH": f"{plugins}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    if side == "stock":  # verl registers its engine for accelerators alone
        environment["VERL_ENGINE_DEVICE"] = "cuda"
    # Its exit status is not checked, because it depends on the reward, which does not rise in few steps.
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    path = output / "metrics.jsonl"
    logged = [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.exists() else []
    logged = [step for step in logged if "actor/grad_norm" in step]
    assert len(logged) == STEPS, f"{side} made {len(logged)} steps:\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
    return logged


def _plugin(folder: Path) -> Path:
    """Write a distribution with an entry point and a list of agents, by which SGLang and verl find ``seeds.py``."""
    found = folder / "drop_in-0.dist-info"
    found.mkdir(parents=True, exist_ok=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: drop-in\nVersion: 0\n")
    (found / "entry_points.txt").write_text(f"[sglang.srt.plugins]\ndrop_in = {_HERE}.seeds:install\n")
    (folder / "agents.yaml").write_text(f"- name: seeded\n  _target_: {_HERE}.seeds.SeededAgentLoop\n")
    return folder


def _compare(stock: list[dict], ours: list[dict]) -> dict[str, list[float]]:
    """Return the difference of each figure in each step; both runs have to log the same figures."""
    apart = {}
    for name in (*RELATIVE, *ABSOLUTE):
        logs = [name in step for step in (*stock, *ours)]
        assert all(logs) or not any(logs), name
        if all(logs):
            pairs = [(one[name], other[name]) for one, other in zip(stock, ours, strict=True)]
            apart[name] = [abs(a - b) / (abs(a) if name in RELATIVE else 1.0) for a, b in pairs]
    return apart


@pytest.mark.parametrize("name", CASES)
def test_run_with_this_engine_logs_the_figures_of_verls_engine(name, tmp_path):
    kind, ep_sizes, settings = CASES[name]
    model = _write_model(tmp_path / "model", kind)
    critic = _write_critic(tmp_path / "critic", model)
    settings = [setting.replace("$critic", str(critic)) for setting in settings]
    stock = _run("stock", tmp_path, model, settings)
    for ep in ep_sizes:
        apart = _compare(stock, _run(f"ep {ep}", tmp_path, model, settings))
        print(f"{name}, ep {ep}: {max(map(max, apart.values())):.1e} in all steps")
        assert max(values[0] for values in apart.values()) <= BOUND, apart
