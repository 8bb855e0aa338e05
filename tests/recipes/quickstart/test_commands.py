"""The quickstart's options and commands, and the folders it writes to."""

import json
from pathlib import Path

import pytest

from epfsdp2.recipes.launch import processes
from epfsdp2.recipes.quickstart import cli, commands, metrics, sampler
from tests.support.trainer.quickstart import command_values


def test_quickstart_commands_are_verls_own_with_every_name_filled(tmp_path):
    words = commands.grpo_command(command_values(tmp_path), ["trainer.save_freq=5"])
    assert words[1:5] == ["-m", "verl.trainer.main_ppo", "engine=epfsdp2", "engine.ep_size=2"]
    assert words[-1] == "trainer.save_freq=5"
    words = commands.warmup_command(command_values(tmp_path))
    at = words.index("verl.trainer.sft_trainer")
    assert words[at + 1 : at + 3] == ["engine=epfsdp2", "engine.ep_size=2"]
    for name in ("grpo", "warmup"):
        filled = commands.overrides(name, command_values(tmp_path))
        assert not [line for line in filled if "$" in line.replace("${algorithm.", "") or "None" in line]
        keys = [line.split("=")[0].lstrip("+") for line in filled]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--steps", "1"], "--steps is 1"),
        (["--batch-size", "7"], "even"),
        (["--batch-size", "102"], "100 questions"),
    ],
)
def test_quickstart_options_out_of_range_are_refused(arguments, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.parse(arguments)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class _NoProcesses(processes.ProcessTree):
    """In the place of ``ProcessTree``, which would end pytest's own children: GRPO leaves its metrics, or fails."""

    def __enter__(self):
        self.folder = Path("/tmp/nothing-is-written-here")
        return self

    def __exit__(self, *_exc):
        pass

    def run(self, command, env, log, tick):
        if "trainer.fails=True" in command:
            log.parent.mkdir()
            log.write_text("ValueError: the real reason\n")
            return 3
        file = Path(env["VERL_FILE_LOGGER_PATH"])
        if file.name != "warmup.jsonl":
            data = {"timing_s/step": 1.0, "perf/total_num_tokens": 10, metrics.PROBS_DIFF: 0.0}
            lines = [{"step": i, "data": {**data, metrics.REWARD: 0.4 + i / 40}} for i in range(1, 21)]
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        tick()
        return 0


def test_quickstart_where_earlier_results_are_keeps_them_and_takes_the_next_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "ProcessTree", _NoProcesses)
    run = tmp_path / "run"
    for name in ("metrics.jsonl", "summary.json", "checkpoints/global_step_5/model", "logs/grpo.log", "my"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    before = _content(run)
    assert cli.main(["--output", str(run), "--dry-run"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    said = capsys.readouterr().out
    assert "verl.trainer.sft_trainer" in said and "verl.trainer.main_ppo" in said
    for number in (2, 3):
        assert cli.main(["--output", str(run)]) == 0
        said = capsys.readouterr().out
        assert f"model, data, logs and metrics in {run}-{number}" in said
        assert "step   1/12  reward 0.425  train/rollout difference 0.0e+00  1.0 s" in said
        assert said.count("train/rollout difference 0") == 20
        assert json.loads((tmp_path / f"run-{number}/summary.json").read_text())["passed"]
    assert cli.main(["--output", str(run), "--override", "trainer.fails=True"]) == 1
    assert "GRPO ended with status 3. The cause, from " in (said := capsys.readouterr().out)
    assert "the real reason" in said and _content(run) == before


@pytest.mark.parametrize("mode, kind", [("sync", "ReplayBuffer"), ("separate_async", "ReplayBufferAsync")])
def test_replay_buffer_of_the_quickstart_is_verls_own_and_asks_ten_times_a_second(mode, kind):
    settings = {"trainer_config": {}, "max_off_policy_threshold": None, "max_off_policy_strategy": "drop"}
    made = sampler.replay_buffer(mode, **settings, sampler_kwargs={"filter_groups": False}, refill_fn=None)
    assert type(made).__name__ == kind and made.poll_interval == 0.1
    with pytest.raises(ValueError, match="custom_sampler.path=null"):
        sampler.replay_buffer(mode, **settings, sampler_kwargs={"filter_groups": True}, refill_fn=None)
