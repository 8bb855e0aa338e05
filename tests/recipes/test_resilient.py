"""The decisions of ``recipes/resilient``: when it restarts, from which step, on which mesh."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from epfsdp2.engine.checkpoint.atomic_folder import MANIFEST
from epfsdp2.engine.errors import SettingError
from epfsdp2.recipes.launch.processes import Interrupted
from epfsdp2.recipes.resilient import cli, mesh
from epfsdp2.recipes.resilient.command import FOLDER, NOTICE, Node, complete_steps, living_nodes
from epfsdp2.recipes.resilient.mesh import divides, largest_mesh
from tests.support.models.tiny import save_qwen3_moe
from tests.support.trainer.resilient import CONFIG, TRAINER, command_of, run_of, save_step

FAKE = Path(__file__).parent / "fake_verl"
ROOT = FAKE.parents[2]
NODE = Node("10.0.0.1", 1, 2)


@pytest.fixture
def model(tmp_path):
    return {"actor_rollout_ref__model__path": str(save_qwen3_moe(tmp_path / "model"))}


_TWICE = "given up: step 5 has failed twice for the same reason"


@pytest.mark.parametrize(
    ("fates", "options", "status", "resumed", "said"),
    [
        ([(5, "a"), (7, "first"), (7, "second")], (), 0, [4, 6, 6], "starts again from step 6"),
        ([(5, "expert 3 of 8 is NaN"), (5, "expert 4 of 8 is NaN")], (), 1, [4], _TWICE),
        ([(3, "x"), (4, "x"), (5, "x")], ("--max-restarts", "2"), 1, [2, 2], "restarted 2 times (--max-restarts)"),
        ([(2, "x")], (), 1, [], "--from-scratch starts anew"),
        ([(2, "x")], ("--from-scratch",), 0, ["disable"], "starts again from the beginning"),
    ],
    ids=["continues", "same reason twice", "too many restarts", "no checkpoint", "from scratch"],
)
def test_resilient_run_that_fails(tmp_path, capsys, fates, options, status, resumed, said):
    run, tree = run_of(tmp_path, *({"step": step, "cause": cause} for step, cause in fates), options=options)
    assert run.to_the_end() == status
    assert tree.resumed() == ["as it says", *(f"global_step_{of}" if of != "disable" else of for of in resumed)]
    printed = capsys.readouterr()
    assert said in printed.err and f"step {fates[0][0]} has failed:\n    RuntimeError: {fates[0][1]}" in printed.err
    assert "step:1 - reward" in printed.out
    logs = sorted(path.name for path in (tmp_path / "resilient").iterdir())
    assert logs == [f"attempt-{number}.log" for number in range(1, len(resumed) + 2)]
    assert all(f'trainer.default_local_dir="{tmp_path}"' in words for words in tree.attempts)


def test_resilient_run_with_a_broken_checkpoint_alone_starts_only_from_scratch(tmp_path, capsys):
    (save_step(tmp_path, 2) / MANIFEST).unlink()
    assert run_of(tmp_path)[0].to_the_end() == 1
    assert "is complete; --from-scratch starts anew" in capsys.readouterr().err


def test_resilient_run_that_starts_from_a_given_checkpoint_does_so_until_it_saves(tmp_path):
    fates = [{"step": 1, "cause": "x"}, {"step": 3, "cause": "y"}]
    run, tree = run_of(tmp_path, *fates, trainer__resume_mode="resume_path")
    assert run.to_the_end() == 0
    assert tree.resumed() == ["as it says", "as it says", "global_step_2"]


@pytest.mark.parametrize("is_deaf", [False, True])
def test_resilient_run_at_sigterm_saves_within_the_grace(tmp_path, capsys, is_deaf):
    def at_step(step):
        time.sleep(0.02)
        if step == 3:
            run.save_and_end()

    grace = "0.3" if is_deaf else "60"
    run, _ = run_of(tmp_path, {"at_step": at_step, "is_deaf": is_deaf}, options=("--grace-seconds", grace))
    with pytest.raises(Interrupted):
        run.to_the_end()
    said = capsys.readouterr().err
    assert not (tmp_path / "save_now").exists()
    assert ("no save within 0.3 s" if is_deaf else "step 4 is saved in") in said


def test_resilient_run_that_loses_a_node_continues_on_fewer_and_returns_to_all(tmp_path, monkeypatch, model):
    living = iter([[NODE, NODE], [NODE], [NODE, NODE]])
    monkeypatch.setattr(cli, "living_nodes", lambda *_: next(living))
    monkeypatch.setattr(cli, "answering", list)
    fates, own = [{"step": 3, "cause": "a node died"}, {"step": 5, "cause": "x"}], {"trainer__nnodes": 2, **model}
    own["ray_kwargs__ray_init__address"] = "auto"
    run, tree = run_of(tmp_path, *fates, **own)
    assert run.to_the_end() == 0
    meshes = [[word for word in words if word.startswith(("trainer.nnodes", "engine."))] for words in tree.attempts]
    fewer = ["trainer.nnodes=1", "engine.ep_size=1", "engine.fsdp_size=-1", "engine.ulysses_sequence_parallel_size=1"]
    assert meshes == [[], fewer, []]
    assert tree.resumed() == ["as it says", "global_step_2", "global_step_4"]


def test_resilient_run_that_hangs_on_a_lost_node_saves_by_the_living_ranks_and_continues(tmp_path, monkeypatch, capsys):
    misses, asked, last = iter([True, False]), [], 0

    def at_step(step):
        nonlocal last
        last = step
        time.sleep(0.02)

    def answering(nodes):  # after one miss again, until step 30
        return [] if next(misses, last >= 30) else list(nodes)

    def trainer():
        while not (tmp_path / NOTICE).exists():
            time.sleep(0.05)
        time.sleep(0.05)
        asked.append((tmp_path / NOTICE).read_text())
        (tmp_path / NOTICE).unlink()

    monkeypatch.setattr(cli, "living_nodes", lambda *_: [NODE])
    monkeypatch.setattr(cli, "answering", answering)
    options = ("--lost-node-seconds", "1", "--save-on-failure", "--from-scratch")
    run, tree = run_of(tmp_path, {"at_step": at_step}, options=options, ray_kwargs__ray_init__address="auto")
    threading.Thread(target=trainer, daemon=True).start()
    assert run.to_the_end() == 0
    assert (
        last >= 30
        and asked == [FOLDER]
        and "has failed:\n    no answer from 10.0.0.1 for 1 s" in capsys.readouterr().err
    )
    callback = "++trainer.checkpoint_callback_class=epfsdp2.recipes.resilient.callback.SaveBeforeTheEnd"
    assert {callback, f'engine.survivors_folder="{tmp_path / FOLDER}"'} <= set(tree.attempts[0])


def test_resilient_run_on_a_small_or_silent_cluster_says_so_at_its_start(tmp_path, monkeypatch, capsys, model):
    own = {"trainer__nnodes": 2, "ray_kwargs__ray_init__address": "10.0.0.1:6379", **model}
    monkeypatch.setattr(cli, "living_nodes", lambda *_: [])
    with pytest.raises(SettingError, match="ray_init.address=10.0.0.1:6379: no Ray cluster answers there"):
        run_of(tmp_path, **own)[0].to_the_end()
    monkeypatch.setattr(cli, "living_nodes", lambda *_: [NODE])
    monkeypatch.setattr(cli, "answering", list)
    assert run_of(tmp_path, **own)[0].to_the_end() == 0
    assert "starts from the beginning: trainer.nnodes=1 engine.ep_size=1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "living", "nodes", "needed"),
    [
        ({}, [8] * 4, 3, 0),  # any of them may be the spare one
        ({}, [8] * 3, 3, 3),
        ({"actor_rollout_ref__rollout__nnodes": 1}, [8] * 4, 3, 4),
        ({}, [8, 4, 8], 2, 2),
    ],
)
def test_nodes_of_a_run_are_large_enough_and_not_of_its_rollout(tmp_path, monkeypatch, changes, living, nodes, needed):
    found = [Node(f"10.0.0.{place}", 1, gpus) for place, gpus in enumerate(living)]
    monkeypatch.setattr(cli, "living_nodes", lambda *_: found)
    monkeypatch.setattr(mesh, "largest_mesh", lambda _, count, gib: (count, [f"trainer.nnodes={count}"]))
    monkeypatch.setattr(cli, "answering", list)
    own = {"trainer__nnodes": 3, "trainer__n_gpus_per_node": 8, "ray_kwargs__ray_init__address": "auto"}
    run, tree = run_of(tmp_path, **own, **changes)
    assert run.to_the_end() == 0
    assert (f"trainer.nnodes={nodes}" in tree.attempts[0]) == (nodes < 3)
    assert len(run._needed) == needed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "is not python -m"),
        (["bash", "run.sh"], "is not python -m with one of verl's trainers"),
        (["python", "-m", "torch.distributed.run", "-m", "verl.trainer.sft_trainer"], "torchrun has"),
        (["torchrun", "-m", "verl.trainer.sft_trainer"], "torchrun has"),
        ([sys.executable, "-m", "verl.no_such_trainer"], "can't be composed: .*No module named"),
        (TRAINER[:-1], "has no engine=epfsdp2"),
    ],
)
def test_resilient_command_that_can_not_run_again_is_refused_in_one_paragraph(
    tmp_path, capsys, monkeypatch, words, told
):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"engine": {"_target_": "verl.FSDPEngineConfig"}}))
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setenv("FAKE_RUN", str(tmp_path))
    assert cli.main(["--", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0 and re.search(told, said) and "What works: " in said


@pytest.mark.parametrize(
    ("options", "changes", "told"),
    [
        ([], {"trainer__save_freq": -1}, r"trainer.save_freq=-1: leaves no checkpoint"),
        (["--from-scratch"], {"trainer__save_freq": -1}, None),
        ([], {"actor_rollout_ref__actor__checkpoint__save_contents": ["model"]}, r"resume without extra, optimizer"),
        ([], {"trainer__del_local_ckpt_after_load": True}, r"del_local_ckpt_after_load=True: removes the checkpoint"),
        ([], {"trainer__resume_mode": "disable"}, r"trainer.resume_mode=disable: .* maybe of another run"),
        (["--save-on-failure"], {}, None),
        (["--save-on-failure"], {"trainer__v1": {"trainer_mode": "colocate_async"}}, "trainer_mode=colocate_async"),
        (["--save-on-failure"], {"trainer__use_v1": False}, "use_v1=False: prevents --save"),
        (["--save-on-failure"], {"trainer__checkpoint_callback_class": "a.B"}, "checkpoint_callback_class=a.B"),
    ],
)
def test_resilient_run_that_could_not_resume_or_save_is_refused_at_the_start(tmp_path, options, changes, told):
    save_step(tmp_path, 2)
    given, command = cli.parse(options), command_of(tmp_path, **changes)
    if told is None:
        cli.check(command, given)
    else:
        with pytest.raises(SettingError, match=told):
            cli.check(command, given)


def test_resilient_with_a_verl_that_has_no_callbacks_is_refused(tmp_path):
    command = command_of(tmp_path)
    del command.config["trainer"]["checkpoint_callback_class"]
    with pytest.raises(SettingError, match="the installed verl can't be asked for a save"):
        cli.check(command, cli.parse([]))


def test_living_nodes_are_those_of_ray_that_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    assert living_nodes("auto", "GPU") == []  # the cluster does not answer
    with socket.create_server(("127.0.0.1", 0)) as node, socket.create_server(("127.0.0.1", 0)) as gone:
        port, closed = node.getsockname()[1], gone.getsockname()[1]
        gone.close()
        monkeypatch.setenv(
            "FAKE_NODES", json.dumps([[8, port, True], [4, port, True], [8, closed, True], [8, port, False]])
        )
        assert [node.gpus for node in living_nodes("auto", "GPU")] == [8, 4]
        assert [node.gpus for node in living_nodes("ray://head", "GPU")] == [8, 4, 8]  # can't be reached


def test_address_of_a_cluster_is_found_as_ray_finds_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    joins = command_of(tmp_path, ray_kwargs__ray_init__address=None)
    assert joins.address == "10.0.0.1:6379"
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert joins.address == ""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.2:6379\n")  # as ray start leaves it
    assert joins.address == "10.0.0.2:6379"
    assert command_of(tmp_path).address == ""  # address=local


def test_largest_mesh_of_fewer_nodes_fits_and_divides(tmp_path, model):
    command = command_of(tmp_path, **model, trainer__nnodes=4)
    assert largest_mesh(command, 2, 80.0)[1][:2] == ["trainer.nnodes=2", "engine.ep_size=4"]
    # Six ranks do not share four sequences.
    assert not divides(command, 6) and divides(command, 4)
    assert largest_mesh(command, 3, 80.0)[0] == 2
    assert largest_mesh(command, 1, 80.0)[1][:2] == ["trainer.nnodes=1", "engine.ep_size=1"]
    with pytest.raises(SettingError, match=r"trainer.nnodes=2: on no mesh of such nodes, 2 GPUs of 1 GiB"):
        largest_mesh(command, 2, 1.0)
    with pytest.raises(SettingError, match="on no mesh"):
        largest_mesh(command, 0, 80.0)
    wide = command_of(tmp_path, **model, actor_rollout_ref__rollout__tensor_model_parallel_size=4)
    assert largest_mesh(wide, 3, 80.0)[0] == 2


def test_resilient_process_restarts_a_killed_trainer_and_at_sigterm_saves_and_leaves_nothing(tmp_path):
    root = tmp_path / "checkpoints"
    config = CONFIG | {"trainer": CONFIG["trainer"] | {"default_local_dir": str(root)}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    paths = filter(None, [str(FAKE), str(ROOT), env.get("PYTHONPATH")])
    env |= {"PYTHONPATH": os.pathsep.join(paths), "FAKE_RUN": str(tmp_path)}
    save_step(tmp_path / "template", 0)
    words = [sys.executable, "-m", "epfsdp2.recipes.resilient", "--backoff-seconds", "0.1", "--", *TRAINER]
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log, deadline = root / "resilient" / "attempt-2.log", time.monotonic() + 120
    while not (log.exists() and "step:5 - " in log.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    output, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "starts again from step 2: trainer.resume_mode=resume_path" in said
    assert f"step {max(complete_steps(root))} is saved" in said
    assert output.count("step:5 - ") == 1 and output.count("step:1 - ") == 1
    assert family and not any(child.is_running() for child in family)
    left = [Path(line) for line in (tmp_path / "left.txt").read_text().splitlines()]
    assert len(left) == 2 and not any(path.exists() for path in left)  # sockets of a killed vLLM
