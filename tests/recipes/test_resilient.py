"""What ``recipes/resilient`` decides, with a trainer's command that saves and fails on demand (``fake_verl``)."""

import copy
import json
import queue
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from epfsdp2.engine.checkpoint.atomic_folder import MANIFEST
from epfsdp2.engine.errors import SettingError
from epfsdp2.recipes.resilient import cli, cluster
from epfsdp2.recipes.resilient.command import Command
from epfsdp2.recipes.resilient.decisions import Failure, backoff_seconds, reason_to_give_up, report
from epfsdp2.recipes.resilient.mesh import divides, largest_mesh
from epfsdp2.recipes.resilient.saving.checkpoints import latest
from tests.support.models.tiny import save_qwen3_moe
from tests.support.trainer.resilient import CONFIG, FAKE, TRAINER, Run, command_of, save_step

pytestmark = pytest.mark.long


def test_resilient_run_that_fails_continues_from_its_last_complete_checkpoint(tmp_path):
    fates = [{"step": 5, "signal": "SIGKILL"}, {"step": 7, "cause": "first"}, {"step": 7, "cause": "second"}]
    run = Run(tmp_path, *fates)
    assert run.to_the_end() == 0, run.said
    assert run.resumed() == ["as it says", "global_step_4", "global_step_6", "global_step_6"]
    assert latest(run.root).step == 8
    assert "step 7 has failed (RuntimeError: second at 0x" in run.said and "starts again from step 6" in run.said
    assert run.output.count("step:5 - ") == 1 and run.output.count("step:8 - ") == 1
    logs = sorted(path.name for path in (run.root / "resilient").iterdir())
    assert logs == [f"attempt-{number}.log" for number in (1, 2, 3, 4)]
    assert all(f'trainer.default_local_dir="{run.root}"' in words for words in run.attempts)
    left = [Path(line) for line in (tmp_path / "left.txt").read_text().splitlines()]
    assert len(left) == 4 and not any(path.exists() for path in left)  # where vLLM's sockets are, too


def test_resilient_run_with_a_step_that_fails_twice_ends_with_a_report(tmp_path):
    run = Run(tmp_path, *[{"step": 5, "cause": "expert 3 of 8 is NaN"}] * 9)
    assert run.to_the_end() == 1
    assert run.resumed() == ["as it says", "global_step_4"]
    written = (run.root / "resilient" / "report.txt").read_text()
    assert "given up: step 5 has failed twice for the same reason" in written and written.split("\n")[0] in run.said
    assert written.count("RuntimeError: expert 3 of 8 is NaN") == 2
    assert "attempt 1, from the beginning" in written and "attempt 2, from step 4" in written


def test_resilient_run_with_max_restarts_ends_after_them(tmp_path):
    run = Run(tmp_path, *[{"step": step, "cause": "x"} for step in (3, 4, 5, 6)])
    assert run.to_the_end("--max-restarts", "2") == 1
    assert len(run.attempts) == 3 and "started again 2 times (--max-restarts)" in run.said


@pytest.mark.parametrize("from_scratch", [False, True])
def test_resilient_run_without_a_checkpoint_restarts_only_from_scratch(tmp_path, from_scratch):
    run = Run(tmp_path, {"step": 2, "cause": "x"})
    assert run.to_the_end(*(["--from-scratch"] if from_scratch else [])) == (0 if from_scratch else 1)
    assert run.resumed() == (["as it says", "disable"] if from_scratch else ["as it says"])
    assert from_scratch or "holds no complete checkpoint to go on from; --from-scratch begins anew" in run.said


@pytest.mark.parametrize("deaf", [False, True])
def test_resilient_run_at_sigterm_saves_within_the_grace(tmp_path, deaf):
    run = Run(tmp_path, {"seconds": 0.5, "deaf": deaf}, save_freq=1000, total_training_steps=1000)
    process = run.start("--grace-seconds", "3" if deaf else "60")
    log = run.root / "resilient" / "attempt-1.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "step:2 - " in log.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - started < 30
    assert not any(child.is_running() for child in family)
    assert not (run.root / "save_now").exists()
    assert len(run.attempts) == 1
    if deaf:
        assert "no save within 3 s; the last one is none" in said
    else:
        saved = latest(run.root)
        assert saved.step >= 3 and f"step {saved.step} is saved" in said


def test_resilient_run_that_loses_a_node_continues_on_fewer_and_returns_to_all(tmp_path):
    config = copy.deepcopy(CONFIG)
    config["trainer"] |= {"nnodes": 2}
    config["ray_kwargs"]["ray_init"]["address"] = "auto"
    config["actor_rollout_ref"]["model"]["path"] = str(save_qwen3_moe(tmp_path / "model"))
    fates = [{"step": 3, "cause": "a node died", "nodes": [2, -2]}, {"step": 5, "cause": "x", "nodes": [2, 2, 4]}]
    run = Run(tmp_path, *fates, config=config)
    (tmp_path / "nodes.json").write_text("[2, 2]")
    assert run.to_the_end("--wait-for-nodes", "0.5") == 0, run.said
    meshes = [[word for word in words if word.startswith(("trainer.nnodes", "engine."))] for words in run.attempts]
    fewer = ["trainer.nnodes=1", "engine.ep_size=2", "engine.fsdp_size=-1", "engine.ulysses_sequence_parallel_size=1"]
    assert meshes == [[], fewer, []]
    assert run.resumed() == ["as it says", "global_step_2", "global_step_4"]
    assert run.said.count("1 of the run's 2 nodes are there") == 1


def test_resilient_run_that_waits_for_a_node_that_is_gone_is_ended_and_continues_on_fewer(tmp_path):
    config = copy.deepcopy(CONFIG)
    config["trainer"] |= {"nnodes": 2}
    config["ray_kwargs"]["ray_init"]["address"] = "auto"
    config["actor_rollout_ref"]["model"]["path"] = str(save_qwen3_moe(tmp_path / "model"))
    run = Run(tmp_path, {"step": 3, "hangs": True, "nodes": [2]}, config=config)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as second:
        (tmp_path / "nodes.json").write_text(json.dumps([2, [2, second.getsockname()[1]]]))
        process = run.start("--lost-node-seconds", "1")
        deadline = time.monotonic() + 60
        while not (tmp_path / "hangs").exists():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.1)
        time.sleep(2)
        assert process.poll() is None and len(run.attempts) == 1  # while all answer
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "step 3 has failed (no answer from 127.0.0.1 for 1 s)" in said
    assert len(run.attempts) == 2 and "trainer.nnodes=1" in run.attempts[1]


def test_node_is_lost_by_refused_connections_and_not_by_one_that_waits(monkeypatch):
    answers: queue.Queue[bool] = queue.Queue()
    monkeypatch.setattr(cluster.Node, "answers", lambda _: answers.get(timeout=60))
    lost = cluster.LostNodes([cluster.Node("10.0.0.1", 1, 8)], seconds=0.1)

    def look(answer: bool | None = None) -> None:
        if answer is not None:
            answers.put(answer)
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            lost.look()
            time.sleep(0.01)

    look()
    look(True)
    with pytest.raises(cluster.NodesLostError, match=r"no answer from 10.0.0.1 for 0.1 s"):
        look(False)
    answers.put(True)  # what the last question waits for


def test_resilient_run_on_a_small_or_silent_cluster_says_so_at_its_start(tmp_path):
    config = copy.deepcopy(CONFIG)
    config["trainer"] |= {"nnodes": 2}
    config["ray_kwargs"]["ray_init"]["address"] = "10.0.0.1:6379"
    config["actor_rollout_ref"]["model"]["path"] = str(save_qwen3_moe(tmp_path / "model"))
    run = Run(tmp_path, config=config)
    assert run.to_the_end() == 2 and run.attempts == []
    assert "ray_kwargs.ray_init.address=10.0.0.1:6379: no Ray cluster answers there" in run.said
    assert "0 of the run's 2 nodes are there" in run.said
    (tmp_path / "nodes.json").write_text("[2]")
    assert run.to_the_end() == 0, run.said
    assert "starts from the beginning: trainer.nnodes=1 engine.ep_size=2" in run.said
    assert "trainer.nnodes=1" in run.attempts[0]


def test_resilient_run_that_starts_from_a_given_checkpoint_reports_the_step(tmp_path):
    given = tmp_path / "other" / "global_step_3"
    run = Run(tmp_path, *[{"step": 4, "cause": "x"}] * 2, resume_mode="resume_path", resume_from_path=str(given))
    assert run.to_the_end() == 1
    assert run.resumed() == ["as it says", "as it says"] and "starts again from step 3" in run.said
    assert "attempt 1, from step 3, on the command's own mesh, failed in step 4" in run.said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (TRAINER, "-- is missing before the trainer's command"),
        (["--max-restarts", "3", *TRAINER], "-- is missing"),
        (["--"], "no command follows"),
        (["--", "bash", "run.sh"], "is not python -m with one of verl's trainers"),
        (["--", "python", "-m", "torch.distributed.run", "-m", "verl.trainer.sft_trainer"], "torchrun has"),
        (["--", "torchrun", "-m", "verl.trainer.sft_trainer"], "torchrun has"),
        (["--", sys.executable, "-m", "verl.no_such_trainer"], "can't be composed: .*No module named"),
    ],
)
def test_resilient_command_that_can_not_run_again_is_refused_in_one_paragraph(capsys, monkeypatch, words, told):
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    assert cli.main(words) == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0 and "What works: " in said
    with pytest.raises(SettingError, match=told):
        options, rest = cli.parse(words)
        Command.of(rest)


def test_resilient_command_of_another_engine_is_refused(tmp_path, monkeypatch):
    run = Run(tmp_path, config=CONFIG | {"engine": {"_target_": "verl.workers.config.FSDPEngineConfig"}})
    for name in ("PYTHONPATH", "FAKE_RUN"):
        monkeypatch.setenv(name, run.env[name])
    with pytest.raises(SettingError, match="has no engine=epfsdp2"):
        Command.of(TRAINER)


def test_a_setting_that_the_engine_has_not_is_refused_before_an_attempt(tmp_path, monkeypatch):
    run = Run(tmp_path)
    for name in ("PYTHONPATH", "FAKE_RUN"):
        monkeypatch.setenv(name, run.env[name])
    with pytest.raises(SettingError, match=r"engine.ep_sizee=2: .*no such setting.*What works: engine.ep_size"):
        Command.of([*TRAINER, "engine.ep_sizee=2"])
    assert Command.of([*TRAINER, "engine.ep_size=2"]).setting("engine.ep_size") == 2


def test_every_setting_of_a_real_command_is_known():
    pytest.importorskip("verl")
    command = Command.of([*TRAINER, "trainer.save_freq=1"])
    assert command.setting("engine.ep_size") == 1 and command.setting("trainer.save_freq") == 1


def test_resilient_run_that_could_not_resume_is_refused_at_the_start(tmp_path):
    cli.check(command_of(tmp_path), from_scratch=False)
    with pytest.raises(SettingError, match=r"trainer.save_freq=-1: there will be no checkpoint"):
        cli.check(command_of(tmp_path, trainer__save_freq=-1), from_scratch=False)
    cli.check(command_of(tmp_path, trainer__save_freq=-1), from_scratch=True)
    with pytest.raises(SettingError, match=r"can't go on without extra, optimizer"):
        contents = {"actor_rollout_ref__actor__checkpoint__save_contents": ["model"]}
        cli.check(command_of(tmp_path, **contents), from_scratch=False)
    with pytest.raises(SettingError, match=r"del_local_ckpt_after_load=True: removes the checkpoint"):
        cli.check(command_of(tmp_path, trainer__del_local_ckpt_after_load=True), from_scratch=False)
    actor = save_step(tmp_path, 2)
    cli.check(command_of(tmp_path), from_scratch=False)
    with pytest.raises(SettingError, match=r"trainer.resume_mode=disable: .* could not tell whose they are"):
        cli.check(command_of(tmp_path, trainer__resume_mode="disable"), from_scratch=False)
    (actor / MANIFEST).unlink()
    with pytest.raises(SettingError, match=r"none of its 1 checkpoints is complete \(global_step_2: actor was not"):
        cli.check(command_of(tmp_path), from_scratch=False)
    cli.check(command_of(tmp_path), from_scratch=True)


def test_reason_to_give_up_of_equal_steps_and_reasons_counts_one_failure():
    def failed(step, text):
        return Failure(step, [text], "a mesh", 2)

    same = [failed(3, f"CUDA error at 0x7f{i}ab on 10.0.0.{i}, rank {i}: out of memory") for i in range(2)]
    assert same[0].reason == same[1].reason
    assert "failed twice" in reason_to_give_up(same, 9)
    assert reason_to_give_up([same[0], failed(4, same[1].lines[0])], 9) is None
    assert reason_to_give_up([same[0], failed(3, "another")], 9) is None
    assert "failed twice" in reason_to_give_up([same[0], failed(3, "another"), same[1]], 9)
    assert reason_to_give_up(same[:1], 1) is None and "--max-restarts" in reason_to_give_up(same[:1], 0)
    stuck = [Failure(1, ["a"])] * 99
    assert [backoff_seconds(stuck[:n]) for n in (1, 2, 3, 7, 99)] == [5.0, 10.0, 20.0, 300.0, 300.0]
    assert backoff_seconds([*stuck, Failure(9, ["a"], resumed=8)]) == 5.0
    assert report(same, "so")[0] == "The run was given up: so."


def test_resilient_run_counts_live_nodes_and_waits_for_them(tmp_path):
    command = command_of(tmp_path, trainer__nnodes=3, trainer__n_gpus_per_node=8)
    large, small = cluster.Node("10.0.0.1", 1, 8), cluster.Node("10.0.0.2", 1, 4)
    assert cluster.usable_nodes(command, [large] * 4) == 3
    assert cluster.usable_nodes(command, [large, small, large]) == 2
    assert cluster.usable_nodes(command, []) == 0
    assert cluster.needed_nodes(command, [large, small, large], 2) == [large, large]
    assert cluster.needed_nodes(command, [large] * 4, 3) == []  # any of them may be the spare one
    shared = command_of(tmp_path, trainer__nnodes=3, trainer__n_gpus_per_node=8, actor_rollout_ref__rollout__nnodes=1)
    assert cluster.usable_nodes(shared, [large] * 3) == 2
    assert cluster.needed_nodes(shared, [large] * 3, 2) == [large] * 3
    assert cluster.address_of(command) is None
    slept, counts = [], [1, 1, 3]
    assert cluster.wait_for_nodes(lambda: counts.pop(0), 3, 60.0, slept.append) == 3
    assert slept == [5.0, 5.0]
    assert cluster.wait_for_nodes(lambda: 1, 3, 0.0, slept.append) == 1


def test_resilient_run_asks_the_cluster_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setenv("FAKE_RUN", str(tmp_path))
    assert cluster.living_nodes("auto") == []  # it does not answer
    with socket.create_server(("127.0.0.1", 0)) as node:
        monkeypatch.setenv("FAKE_NODE_PORT", str(node.getsockname()[1]))
        (tmp_path / "nodes.json").write_text("[8, 4, -8]")
        assert [node.gpus for node in cluster.living_nodes("auto")] == [8, 4]  # without the one that does not answer
        assert [node.gpus for node in cluster.living_nodes("ray://head")] == [8, 4, 8]  # which can't be asked
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    joins = command_of(tmp_path, ray_kwargs__ray_init__address=None)
    assert cluster.address_of(joins) == "10.0.0.1:6379"
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert cluster.address_of(joins) is None
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.2:6379\n")  # what ray start leaves
    assert cluster.address_of(joins) == "10.0.0.2:6379"
    assert cluster.address_of(command_of(tmp_path)) is None  # address=local


def test_largest_mesh_of_fewer_nodes_fits_and_divides(tmp_path):
    model = {"actor_rollout_ref__model__path": str(save_qwen3_moe(tmp_path / "model"))}
    command = command_of(tmp_path, **model, trainer__nnodes=4)
    assert largest_mesh(command, 2, 80.0)[:2] == ["trainer.nnodes=2", "engine.ep_size=4"]
    # Six ranks do not share four sequences.
    assert not divides(command, 6) and divides(command, 4)
    assert largest_mesh(command, 3, 80.0)[0] == "trainer.nnodes=2"
    assert largest_mesh(command, 1, 80.0)[:2] == ["trainer.nnodes=1", "engine.ep_size=2"]
    with pytest.raises(SettingError, match=r"trainer.nnodes=2: such nodes of 2 GPUs with 1 GiB are left; on no mesh"):
        largest_mesh(command, 2, 1.0)
    with pytest.raises(SettingError, match="on no mesh"):
        largest_mesh(command, 0, 80.0)
    wide = command_of(tmp_path, **model, actor_rollout_ref__rollout__tensor_model_parallel_size=4)
    assert largest_mesh(wide, 3, 80.0)[0] == "trainer.nnodes=2"
