"""Restart a failed run from its last complete checkpoint, on the nodes that are left.

    python -m epfsdp2.recipes.resilient [options] -- python -m verl.trainer.main_ppo engine=epfsdp2 ...

It runs the command itself with a few overrides behind it. When the command fails, the nodes of the Ray cluster that it
joins are counted again; if some are gone, the run continues on the largest mesh that fits by the plan, with the same
batch.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from rich.console import Console

from ...engine.errors import SettingError
from ..quickstart.processes import Interrupted, ProcessTree
from .attempts import Attempt, Preemption
from .cluster import (
    LostNodes,
    Node,
    NodesLostError,
    address_of,
    living_nodes,
    needed_nodes,
    usable_nodes,
    wait_for_nodes,
)
from .command import Command
from .decisions import Failure, backoff_seconds, reason_to_give_up, report
from .saving.checkpoints import Saved, latest, saved_steps
from .saving.survivors import FOLDER, ask_trainer

__all__ = ["check", "main", "parse"]

_CALLBACK = "epfsdp2.recipes.resilient.saving.notice.SaveOnNotice"
_CALLBACK_ON_FAILURE = "epfsdp2.recipes.resilient.saving.failure.SaveOnFailure"
# By default a rank whose peer has died ends its process; by this it ends the collective (torch's ProcessGroupNCCL.hpp).
_ABORT_ONLY = '++ray_kwargs.ray_init.runtime_env.env_vars.TORCH_NCCL_ASYNC_ERROR_HANDLING="2"'
_RESUMED = {"model", "optimizer", "extra"}


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options and the command behind ``--``.

    Raises:
        SettingError: there is no ``--``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m epfsdp2.recipes.resilient",
        description="Run one of verl's trainers, and start it again from its last complete checkpoint when it fails.",
        epilog="-- python -m verl.trainer.main_ppo engine=epfsdp2 ... follows the options.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--max-restarts", type=int, default=10, help="starts after the first")
    add("--grace-seconds", type=float, default=30.0, help="for a save between SIGTERM and the end")
    add("--wait-for-nodes", type=float, default=0.0, metavar="S", help="seconds to wait for nodes that are gone")
    add("--lost-node-seconds", type=float, default=60.0, metavar="S", help="end an attempt that lost a node; 0: never")
    add("--save-on-failure", action="store_true", help="have the ranks that are left save the last complete step")
    add("--from-scratch", action="store_true", help="begin anew where no checkpoint is complete")
    add(
        "--gib", type=float, help="memory of a GPU, for the plan on fewer nodes; by default 80, without GPUs the host's"
    )
    add(
        "--backoff-seconds",
        type=float,
        default=5.0,
        help="pause before a restart; doubles up to 300 while no step is saved",
    )
    if "--" not in arguments:
        parser.parse_args([word for word in arguments if word in ("-h", "--help")])
        works = "python -m epfsdp2.recipes.resilient -- python -m verl.trainer.main_ppo engine=epfsdp2 ..."
        raise SettingError("resilient", " ".join(arguments), "-- is missing before the trainer's command.", works)
    at = list(arguments).index("--")
    options = parser.parse_args(arguments[:at])
    for name in ("max_restarts", "grace_seconds", "wait_for_nodes", "lost_node_seconds", "backoff_seconds"):
        if getattr(options, name) < 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it has to be at least 0")
    return options, list(arguments[at + 1 :])


def check(command: Command, from_scratch: bool) -> None:
    """Check that a run can be resumed.

    Raises:
        SettingError: it saves nothing, or too little, or where another run's checkpoints are.
    """
    frequency = int(command.setting("trainer.save_freq", -1))
    if frequency <= 0 and not from_scratch:
        works = "trainer.save_freq=20; or --from-scratch, which begins anew each time"
        raise SettingError("trainer.save_freq", frequency, "there will be no checkpoint to go on from.", works)
    contents = command.setting("actor_rollout_ref.actor.checkpoint.save_contents", ())
    if lacking := sorted(_RESUMED - set(contents)) if frequency > 0 else []:
        rule = f"a run can't go on without {', '.join(lacking)}."
        works = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]"
        raise SettingError("actor_rollout_ref.actor.checkpoint.save_contents", list(contents), rule, works)
    if command.setting("trainer.del_local_ckpt_after_load"):
        rule = "removes the checkpoint that the next restart would need."
        works = "trainer.del_local_ckpt_after_load=False"
        raise SettingError("trainer.del_local_ckpt_after_load", True, rule, works)
    root, queue = command.checkpoints, command.saves_queue
    found = saved_steps(root, queue)
    if found and command.setting("trainer.resume_mode") == "disable":
        rule = f"{root} holds checkpoints, of which a later restart could not tell whose they are."
        raise SettingError("trainer.resume_mode", "disable", rule, "trainer.resume_mode=auto, or a folder of its own")
    if found and latest(root, queue) is None and not from_scratch:
        rule = f"none of its {len(found)} checkpoints is complete ({found[-1].folder.name}: {found[-1].fault})."
        raise SettingError("trainer.default_local_dir", root, rule, "--from-scratch, which begins anew")


def check_survivors(command: Command) -> None:
    """Check that a run can be saved by the ranks that are left after a failure.

    Raises:
        SettingError: verl's trainer would not say when it fails, or has more state than its ranks.
    """
    if command.saves_queue or not command.setting("trainer.use_v1", True):
        rule = "has prompts under way that ranks don't hold, or does not say that it fails."
        mode = command.setting("trainer.v1.trainer_mode")
        raise SettingError("--save-on-failure", mode, rule, "trainer.use_v1=True trainer.v1.trainer_mode=sync")
    if own := command.setting("trainer.checkpoint_callback_class"):
        rule = "is in the place of the callback that --save-on-failure needs."
        raise SettingError("trainer.checkpoint_callback_class", own, rule, "a command without it")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run to the end; return 0 where the run has ended, 1 where it was given up, 2 for what can't work at all."""
    console = Console(highlight=False, soft_wrap=True, stderr=True)
    try:
        options, words = parse(sys.argv[1:] if arguments is None else arguments)
        command = Command.of(words)
        check(command, options.from_scratch)
        if options.save_on_failure:
            check_survivors(command)
        with ProcessTree() as tree:
            return _Run(options, command, console, tree).to_the_end()
    except Interrupted as interrupted:
        console.print(f"interrupted by {interrupted}; every process of this run has ended", style="yellow")
        return 128 + interrupted.number
    except SettingError as error:
        console.print(str(error), style="red", markup=False)
        return 2


class _Run:
    """A run, and what has become of it so far."""

    def __init__(self, options: argparse.Namespace, command: Command, console: Console, tree: ProcessTree):
        self._options, self._command, self._console, self._tree = options, command, console, tree
        self._root = command.checkpoints
        self._failures: list[Failure] = []
        self._needed: list[Node] = []
        self._preemption = Preemption(self._root, self._newest, options.grace_seconds, self._say)
        self._preemption.install()

    def to_the_end(self) -> int:
        while True:
            try:
                on_mesh = self._mesh()
            except SettingError as error:
                if not self._failures:
                    raise
                return self._give_up(str(error))
            shutil.rmtree(self._root / FOLDER, ignore_errors=True)
            saved = self._newest()
            attempt = Attempt(self._free_log())
            changed = [*on_mesh, *self._resume(saved)]
            words = self._command.with_overrides([*changed, *self._settings()])
            if self._failures or changed:
                self._say(f"starts {'again ' if self._failures else ''}{self._from(saved)}: {' '.join(changed)}")
            # vLLM's sockets go where the recipe cleans up: one that is killed leaves them.
            paths = {"VLLM_RPC_BASE_PATH": str(self._tree.folder)}
            try:
                if attempt.run(self._tree, words, {**paths, **os.environ}, self._looks()) == 0:
                    return 0
                lines = attempt.cause()
            except NodesLostError as error:
                lines = [str(error), *attempt.cause()]
            begun = self._begun(saved)
            step = (attempt.step if attempt.step is not None else begun or 0) + 1
            mesh = " ".join(on_mesh) or "the command's own mesh"
            self._failures.append(Failure(step, lines, mesh, begun))
            if (why := self._why_not_again()) is not None:
                return self._give_up(why)
            pause = backoff_seconds(self._failures, self._options.backoff_seconds)
            self._say(f"step {step} has failed ({self._failures[-1].lines[0]}); a pause of {pause:g} s")
            self._pause(pause)

    def _looks(self) -> Callable[[], None]:
        seconds = self._options.lost_node_seconds
        lost = LostNodes(self._needed if seconds else [], seconds)

        def look() -> None:
            self._preemption.look()
            try:
                lost.look()
            except NodesLostError:
                if self._options.save_on_failure:
                    ask_trainer(self._root)
                raise

        return look

    def _why_not_again(self) -> str | None:
        why = reason_to_give_up(self._failures, self._options.max_restarts)
        if why is None and not self._options.from_scratch and not self._can_resume():
            why = f"{self._root} holds no complete checkpoint to go on from; --from-scratch begins anew"
        return why

    def _newest(self) -> Saved | None:
        return latest(self._root, self._command.saves_queue)

    def _can_resume(self) -> bool:
        return self._newest() is not None or self._command.setting("trainer.resume_mode") == "resume_path"

    def _resume(self, saved: Saved | None) -> list[str]:
        if saved is not None:
            return ["trainer.resume_mode=resume_path", f'trainer.resume_from_path="{saved.folder}"']
        if self._can_resume() or not (self._failures or saved_steps(self._root, self._command.saves_queue)):
            return []  # as the command says
        return ["trainer.resume_mode=disable"]

    def _settings(self) -> list[str]:
        """Return settings: one folder for all of Ray's workers, and saving at SIGTERM unless the run has a callback."""
        folder = f'trainer.default_local_dir="{self._root}"'
        if self._options.save_on_failure:
            messages = f'engine.survivors_folder="{self._root / FOLDER}"'
            return [folder, messages, _ABORT_ONLY, f"++trainer.checkpoint_callback_class={_CALLBACK_ON_FAILURE}"]
        own = self._command.setting("trainer.checkpoint_callback_class")
        return [folder] if own else [folder, f"++trainer.checkpoint_callback_class={_CALLBACK}"]

    def _mesh(self) -> list[str]:
        """Return the settings of the mesh on the nodes that live; none where all are there.

        Raises:
            SettingError: what is left is too small, or the cluster does not answer.
        """
        wanted, address = int(self._command.setting("trainer.nnodes", 1)), address_of(self._command)
        if address is None:
            return []
        living: list[Node] = []
        told = {wanted}

        def usable() -> int:
            living[:] = living_nodes(address, self._resource)
            nodes = usable_nodes(self._command, living)
            if nodes not in told:
                told.add(nodes)
                self._say(f"{nodes} of the run's {wanted} nodes are there")
            return nodes

        nodes = wait_for_nodes(usable, wanted, self._options.wait_for_nodes, self._pause)
        asked = [] if address.startswith("ray://") else living
        self._needed = needed_nodes(self._command, asked, nodes)
        if nodes == wanted:
            return []
        if not living:
            rule = "no Ray cluster answers there, and a run can't go on without the cluster's head node."
            works = "the address of a cluster that answers, and --wait-for-nodes 600 for one that is started again"
            raise SettingError("ray_kwargs.ray_init.address", address, rule, works)
        from .mesh import largest_mesh  # takes seconds to import, and is seldom needed

        mesh = largest_mesh(self._command, nodes, self._gib)
        self._needed = needed_nodes(self._command, asked, int(mesh[0].removeprefix("trainer.nnodes=")))
        return mesh

    @property
    def _resource(self) -> str:
        return "NPU" if self._command.setting("trainer.device") == "npu" else "GPU"

    @property
    def _gib(self) -> float:
        if self._options.gib is not None:
            return self._options.gib
        if self._command.setting("trainer.device") != "cpu":
            return 80.0
        return psutil.virtual_memory().total / int(self._command.setting("trainer.n_gpus_per_node", 8)) / 2**30

    def _pause(self, seconds: float) -> None:
        """Sleep; SIGTERM ends the pause, since no run is there to save."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._preemption.end_if_asked()
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))

    def _give_up(self, why: str) -> int:
        lines = report(self._failures, why)
        path = self._root / "resilient" / "report.txt"
        path.write_text("\n".join(lines) + "\n")
        for line in [*lines, f"This report is in {path}; the logs are beside it."]:
            self._console.print(line, style="red", markup=False)
        return 1

    def _free_log(self) -> Path:
        folder = self._root / "resilient"
        folder.mkdir(parents=True, exist_ok=True)
        taken = [int(path.stem.rpartition("-")[2]) for path in folder.glob("attempt-*.log")]
        return folder / f"attempt-{max(taken, default=0) + 1}.log"

    def _begun(self, saved: Saved | None) -> int | None:
        """Return the step that an attempt goes on from; None if it begins anew."""
        given = str(self._command.setting("trainer.resume_from_path", "")).rstrip("/").rpartition("global_step_")[2]
        if saved is None and self._command.setting("trainer.resume_mode") == "resume_path" and given.isdecimal():
            return int(given)
        return None if saved is None else saved.step

    def _from(self, saved: Saved | None) -> str:
        begun = self._begun(saved)
        return "from the beginning" if begun is None else f"from step {begun}"

    def _say(self, text: str) -> None:
        self._console.print(f"[resilient] {text}", style="yellow", markup=False)
