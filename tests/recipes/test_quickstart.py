"""The quickstart's plain functions: task, model, commands, verdict, causes, and that it ends what it started."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from epfsdp2.recipes.quickstart import cli, commands, failure, metrics, model, sampler, task

# ---------------------------------------------------------------------------------------------------------- the task


def test_reward_of_any_answer_is_exact():
    score = lambda answer: task.compute_score(task.DATA_SOURCE, answer, "12", {"index": 0})  # noqa: E731
    assert score("12") == 1.0
    assert [score(wrong) for wrong in ("", "1", "2", "012", "12 ", "123", "13")] == [0.0] * 7


def test_reward_of_other_data_is_refused():
    with pytest.raises(ValueError, match="gsm8k"):
        task.compute_score("openai/gsm8k", "12", "12")


def test_task_problems_have_right_answers():
    assert len(set(task.problems())) == 100
    assert all(eval(question.rstrip("=")) == int(answer) for question, answer in task.problems())


def test_task_labels_are_as_noisy_as_asked_and_right_answers_win():
    answers = dict(task.problems())
    rows = task.warmup_rows(seed=3, copies=200, right_share=0.4)
    told = pd.DataFrame([(m[0]["content"], m[1]["content"]) for m in (row["messages"] for row in rows)])
    assert (told[0].map(answers) == told[1]).mean() == pytest.approx(0.4, abs=0.02)
    for question, labels in told.groupby(0)[1]:
        counts = labels.value_counts()
        assert counts.index[0] == answers[question]
        assert counts.iloc[1] < counts.iloc[0] / 2


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_task_with_a_share_of_right_labels_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match="right_share"):
        task.warmup_rows(1, 1, share)


def test_task_datasets_depend_on_the_seed_alone(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        task.write_datasets(tmp_path / name, seed, copies=2, right_share=0.5)
    for file in ("warmup.parquet", "grpo.parquet"):
        a, b, c = (pd.read_parquet(tmp_path / name / file).to_json() for name in "abc")
        assert a == b
        assert a != c


# --------------------------------------------------------------------------------------------------------- the model


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.write_model(folder, seed=1)
    return folder


def test_tokenizer_of_any_text_decodes_what_it_encoded(saved_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    for question, answer in task.problems():
        ids = tokenizer(question + answer)["input_ids"]
        assert len(ids) == len(question + answer)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == question + answer
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == question + answer


def test_chat_template_is_the_sum_of_its_turns(saved_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    turns = task.warmup_rows(1, 1, 0.5)[0]["messages"]
    apply = lambda messages, **kw: tokenizer.apply_chat_template(messages, return_dict=False, **kw)  # noqa: E731
    assert apply(turns) == apply(turns[:1]) + apply(turns[1:])
    prompt = apply(turns[:1], add_generation_prompt=True)
    assert prompt == apply(turns)[: len(prompt)]
    assert apply(turns)[-1] == tokenizer.eos_token_id


def test_model_vocabulary_is_exactly_the_tokenizers(saved_model):
    """vLLM masks logits beyond the tokenizer; one row too many would be a constant log-prob difference."""
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(saved_model), AutoTokenizer.from_pretrained(saved_model)
    assert config.vocab_size == len(tokenizer)
    with safe_open(saved_model / "model.safetensors", "pt") as file:
        assert file.get_tensor("lm_head.weight").shape[0] == len(tokenizer)


def test_model_checkpoint_has_the_original_names_and_useful_shapes(saved_model):
    with safe_open(saved_model / "model.safetensors", "pt") as file:
        names = set(file.keys())
        gate = file.get_tensor("model.layers.1.mlp.experts.15.gate_proj.weight")
    assert not any("gate_up_proj" in name for name in names)
    assert gate.dtype == torch.float32
    inner, hidden = gate.shape
    assert hidden != inner and hidden != 2 * inner
    assert hidden % 32 == inner % 32 == 0


def test_model_depends_on_the_seed_alone_and_leaves_torch_alone():
    tokenizer = model.build_tokenizer()
    before = torch.get_rng_state()
    a, b, c = (model.build_model(tokenizer, seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())


def test_quickstart_bucket_holds_every_expert_tensor_and_not_the_model(tmp_path):
    experts = model.build_model(model.build_tokenizer(), 1)
    bucket = next(o for o in commands.overrides("grpo", _values(tmp_path)) if "bucket_megabytes" in o)
    size = int(bucket.split("=")[1]) << 20
    bytes_of = [p.numel() * p.element_size() for p in experts.parameters()]
    assert max(bytes_of) < size
    assert sum(bytes_of) > 2 * size


# ------------------------------------------------------------------------------------------------------ the commands


def _values(folder: Path) -> dict:
    names = ("output", "model", "warmup_data", "grpo_data", "reward_file", "sampler_file", "ray_dir")
    names += ("warmup_batch_of_a_rank",)
    return vars(cli.parse([])) | {name: folder / name for name in names}


def test_quickstart_commands_are_verls_own(tmp_path):
    words = commands.grpo_command(_values(tmp_path), ["trainer.save_freq=5"])
    assert words[1:5] == ["-m", "verl.trainer.main_ppo", "engine=epfsdp2", "engine.ep_size=2"]
    assert words[-1] == "trainer.save_freq=5"
    words = commands.warmup_command(_values(tmp_path))
    at = words.index("verl.trainer.sft_trainer")
    assert words[at + 1 : at + 3] == ["engine=epfsdp2", "engine.ep_size=2"]


@pytest.mark.parametrize("name", ["grpo", "warmup"])
def test_quickstart_command_has_every_name_filled(name, tmp_path):
    filled = commands.overrides(name, _values(tmp_path))
    assert not [line for line in filled if "$" in line.replace("${algorithm.", "") or "None" in line]
    keys = [line.split("=")[0].lstrip("+") for line in filled]
    assert len(keys) == len(set(keys))


def test_quickstart_command_when_printed_is_the_command(tmp_path):
    words = commands.grpo_command(_values(tmp_path), [])
    printed = subprocess.run(
        ["bash", "-c", f'python() {{ printf "%s\\n" "$@"; }}; {commands.pretty(words)}'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.splitlines() == words[1:]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--steps", "1"], "--steps is 1"),
        (["--batch-size", "7"], "even"),
        (["--batch-size", "102"], "100 questions"),
        (["--model", "/nowhere"], "no config.json"),
    ],
)
def test_quickstart_options_out_of_range_are_refused(arguments, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.parse(arguments)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------- the folder


def _earlier_run(folder: Path) -> dict[str, bytes]:
    """What an earlier run left, and what somebody put beside it."""
    names = (
        "metrics.jsonl",
        "summary.json",
        "quickstart.png",
        "checkpoints/global_step_5/model",
        "logs/grpo.log",
        "my",
    )
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return _content(folder)


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class _NoProcesses:
    """In the place of ``ProcessTree``, which would end pytest's own children: both trainers just leave their files."""

    def __enter__(self):
        self.folder = Path("/tmp/nothing-is-written-here")
        return self

    def __exit__(self, *_exc):
        pass

    def run(self, command, env, log, tick):
        file = Path(env["VERL_FILE_LOGGER_PATH"])
        if file.name == "warmup.jsonl":
            last = file.parent / "warmup/global_step_80/huggingface"
            last.mkdir(parents=True)
            (last / "config.json").write_text("{}")
        else:
            data = {"timing_s/step": 1.0, "perf/total_num_tokens": 10, metrics.PROBS_DIFF: 0.0}
            lines = [{"step": i, "data": {**data, metrics.REWARD: 0.4 + i / 40}} for i in range(1, 21)]
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        tick()
        return 0


@pytest.fixture
def no_processes(monkeypatch):
    monkeypatch.setattr(cli, "ProcessTree", _NoProcesses)


def test_quickstart_dry_run_in_a_folder_with_results_writes_and_removes_nothing(tmp_path, capsys, no_processes):
    before = _earlier_run(tmp_path / "run")
    assert cli.main(["--output", str(tmp_path / "run"), "--dry-run"]) == 0
    assert _content(tmp_path / "run") == before and [path.name for path in tmp_path.iterdir()] == ["run"]
    said = capsys.readouterr().out
    assert "verl.trainer.sft_trainer" in said and "verl.trainer.main_ppo" in said


def test_quickstart_run_where_earlier_ones_are_takes_the_next_folder(tmp_path, capsys, no_processes):
    before = _earlier_run(tmp_path / "run")
    for number in (2, 3):
        assert cli.main(["--output", str(tmp_path / "run")]) == 0
        said = capsys.readouterr().out
        assert f"{tmp_path / 'run'} has an earlier run, which is kept" in said
        assert f"model and data in {tmp_path / f'run-{number}'}" in said
        assert "step   1/12  reward 0.425  train/rollout difference 0.0e+00  1.0 s" in said
        assert said.count("train/rollout difference 0") == 20
        assert json.loads((tmp_path / f"run-{number}/summary.json").read_text())["passed"]
    assert _content(tmp_path / "run") == before


def test_quickstart_run_without_matplotlib_ends_well_and_says_how_to_get_it(
    tmp_path, capsys, monkeypatch, no_processes
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["--output", str(tmp_path / "run")]) == 0
    assert "no plot: matplotlib is not installed (pip install matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "run/quickstart.png").exists() and (tmp_path / "run/summary.json").exists()


# -------------------------------------------------------------------------------------------------------- the buffer


@pytest.mark.parametrize("mode, kind", [("sync", "ReplayBuffer"), ("separate_async", "ReplayBufferAsync")])
def test_replay_buffer_of_the_quickstart_is_verls_own_and_asks_ten_times_a_second(mode, kind):
    settings = {"trainer_config": {}, "max_off_policy_threshold": None, "max_off_policy_strategy": "drop"}
    made = sampler.replay_buffer(mode, **settings, sampler_kwargs={"filter_groups": False}, refill_fn=None)
    assert type(made).__name__ == kind and made.poll_interval == 0.1
    with pytest.raises(ValueError, match="custom_sampler.path=null"):
        sampler.replay_buffer(mode, **settings, sampler_kwargs={"filter_groups": True}, refill_fn=None)


# ------------------------------------------------------------------------------------------------------- the verdict


def _steps(rewards, probs_diff=1e-8):
    phases = dict.fromkeys(metrics.PHASES, 0.5)
    return [metrics.Step(i + 1, r, probs_diff, 1000.0, 2.5, phases) for i, r in enumerate(rewards)]


def _ramp(first, last, count=40):
    return [first + (last - first) * i / (count - 1) for i in range(count)]


def test_verdict_of_a_rising_reward_passes():
    facts = metrics.conclude(_steps(_ramp(0.4, 0.97)), 40, 128)
    assert facts["passed"] and facts["failures"] == []
    assert facts["window_steps"] == 4
    assert facts["first_reward"] < 0.45 < 0.9 < facts["last_reward"]


@pytest.mark.parametrize(
    "rewards",
    [
        pytest.param([0.45] * 40, id="flat"),
        pytest.param(_ramp(0.4, 0.48), id="less than a tenth up"),
        pytest.param(_ramp(0.9, 0.4), id="falling"),
        pytest.param([0.3, 0.6] * 18 + [0.3, 0.6, 0.6, 0.6], id="noise"),
        pytest.param([math.nan] * 40, id="not a number"),
    ],
)
def test_verdict_of_a_reward_that_does_not_clearly_rise_fails(rewards):
    facts = metrics.conclude(_steps(rewards), 40, 128)
    assert not facts["passed"]
    assert "did not clearly rise" in facts["failures"][0]


def test_verdict_of_few_samples_needs_a_larger_rise():
    """Two equal neighbours are no proof of precision: 4 samples a step scatter by 0.25 whatever the window shows."""
    rewards = [0.5, 0.5] + [0.6] * 16 + [0.75, 0.75]
    assert metrics.conclude(_steps(rewards), 20, 1024)["passed"]
    assert not metrics.conclude(_steps(rewards), 20, 4)["passed"]


@pytest.mark.parametrize("diff", [6e-3, math.nan])
def test_verdict_of_one_step_of_disagreement_fails(diff):
    steps = _steps(_ramp(0.4, 0.97))
    steps[17] = _steps([0.6] * 18, diff)[17]
    (failure,) = metrics.conclude(steps, 40, 128)["failures"]
    assert "at step 18" in failure


def test_verdict_of_missing_steps_fails():
    assert "only 30 of 40" in metrics.conclude(_steps(_ramp(0.4, 0.97, 30)), 40, 128)["failures"][0]
    for few in (0, 1):
        facts = metrics.conclude(_steps([0.5] * few), 40, 128)
        assert facts == {"steps": few, "passed": False, "failures": [f"only {few} of 40 steps ran"]}


def test_metrics_are_read_as_they_are_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert metrics.read_steps(path) == []
    line = json.dumps({"step": 1, "data": {metrics.REWARD: 0.5, metrics.PROBS_DIFF: None, "timing_s/gen": 2.0}}) + "\n"
    path.write_text(json.dumps({"step": 0, "data": {"val/acc": 1}}) + "\n" + line + line[:20])
    (step,) = metrics.read_steps(path)
    assert (step.reward, step.phases["generation"]) == (0.5, 2.0)
    assert math.isnan(step.probs_diff)
    assert len(metrics.read_records(path)) == 2
    with path.open("a") as file:
        file.write(line[20:].replace('"step": 1', '"step": 2'))
    assert len(metrics.read_steps(path)) == 2


def test_report_writes_plot_and_summary(tmp_path):
    steps = _steps(_ramp(0.4, 0.97))
    assert metrics.write_plot(steps, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    console = Console(record=True, width=100)
    metrics.print_summary(console, metrics.conclude(steps, 40, 128))
    text = console.export_text()
    assert "400" in text  # 1000 tokens in 2.5 seconds
    assert all(name in text for name in ("seconds per step", *metrics.PHASES))


# -------------------------------------------------------------------------------------------------------- the causes


@pytest.mark.parametrize(
    "log, says",
    [
        (
            "\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m Traceback (most recent call last):\n"
            "\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m   File x\n"
            "\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m ValueError: the real reason\n"
            "ray.exceptions.RayTaskError(RuntimeError): wrapper\n",
            ["ValueError: the real reason", "ray.exceptions.RayTaskError(RuntimeError): wrapper"],
        ),
        (
            "Could not override 'engine.mixed'.\nKey 'mixed' is not in struct\n",
            ["Could not override 'engine.mixed'.", "Key 'mixed' is not in struct"],
        ),
        (
            "\x1b[36m(Worker pid=7)\x1b[0m KeyError: what came before\n"
            "ray.exceptions.RayTaskError(WeightSyncError): wrapper\n"
            "pkg.WeightSyncError: rank 0: the cause\n\n"
            "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n"
            "\x1b[36m(Worker pid=7)\x1b[0m WARNING what came after\n",
            ["pkg.WeightSyncError: rank 0: the cause"],
        ),
        ("all is well\nKilled\n", ["all is well", "Killed"]),
    ],
)
def test_cause_of_a_failure_is_found_in_its_log(log, says, tmp_path):
    (tmp_path / "log").write_text(log)
    assert failure.cause(tmp_path / "log") == says


# ----------------------------------------------------------------------------------------------------- the processes

# A command whose daemon leaves its session and its parent, as Ray's do.
_DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
open(sys.argv[1], "w").write("ready")
time.sleep(float(sys.argv[2]))
"""
_RUNNER = """
import pathlib, sys
from epfsdp2.recipes.quickstart.processes import Interrupted, ProcessTree
try:
    with ProcessTree() as tree:
        print(tree.folder, flush=True)
        command = [sys.executable, "-c", sys.argv[1], sys.argv[2], sys.argv[3]]
        sys.exit(tree.run(command, {}, pathlib.Path(sys.argv[2] + ".log"), lambda: None))
except Interrupted as interrupted:
    sys.exit(100 + interrupted.number)
"""


@pytest.mark.parametrize(
    "numbers",
    [(), (signal.SIGINT,), (signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM), (signal.SIGINT,) * 20],
    ids=lambda numbers: "-".join(n.name for n in numbers[:3]) or "none",
)
def test_process_tree_that_is_ended_leaves_no_process(numbers, tmp_path):
    """Also not when an impatient user, or a supervisor, sends more than one signal."""
    seconds = "600" if numbers else "0"
    words = [sys.executable, "-c", _RUNNER, _DAEMON, str(tmp_path / "ready"), seconds]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as runner:
        family = [psutil.Process(runner.pid)]
        while runner.poll() is None and not (tmp_path / "ready").exists():
            time.sleep(0.05)
        family += family[0].children(recursive=True) if runner.poll() is None else []
        assert len(family) >= 3 or not numbers
        for number in numbers:
            os.kill(runner.pid, number)
        folder = Path(runner.stdout.readline().strip())
        # Which of several that arrive together is handled first is not ours to say.
        assert runner.wait(timeout=30) in ({100 + n for n in numbers} or {0})
    assert not folder.exists()
    assert not [p for p in family if p.is_running()]


# Maps a segment and ends without removing it, as a killed worker does; or so does its child, when it is terminated.
_LEAVES = """
import os, signal, sys, time
from multiprocessing import resource_tracker, shared_memory

def leave(*_):
    segment = shared_memory.SharedMemory(name=sys.argv[1], create=True, size=4096)
    resource_tracker.unregister(segment._name, "shared_memory")
    time.sleep(1.5)
    os._exit(0)

if sys.argv[2] == "by itself":
    leave()
signal.signal(signal.SIGTERM, leave)
if os.fork() == 0:
    time.sleep(60)
"""
_TREE_OF_ONE = """
import os, pathlib, sys
from epfsdp2.recipes.quickstart import processes
processes._LOOK_SECONDS = 0.1
mine, others = (pathlib.Path("/dev/shm") / name for name in sys.argv[2:4])
with processes.ProcessTree() as tree:
    others.write_bytes(b"")
    command = [sys.executable, "-c", sys.argv[1], mine.name, sys.argv[4]]
    assert tree.run(command, dict(os.environ), pathlib.Path(sys.argv[5]), lambda: None) == 0
    assert mine.exists()
assert others.exists() and not mine.exists(), os.listdir("/dev/shm")
"""


@pytest.mark.parametrize("when", ["by itself", "terminated"])
def test_process_tree_that_ends_removes_its_own_segments_and_no_others(tmp_path, when):
    """Another container that shares this machine's memory may have made one that no process here has mapped."""
    names = [f"psm_{os.getpid()}_{whose}" for whose in ("mine", "others")]
    try:
        words = [sys.executable, "-c", _TREE_OF_ONE, _LEAVES, *names, when, str(tmp_path / "log")]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
    finally:
        for name in names:
            Path("/dev/shm", name).unlink(missing_ok=True)
