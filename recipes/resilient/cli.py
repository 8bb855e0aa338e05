"""Restart a failed run from its last complete checkpoint, on the remaining nodes.

python -m epfsdp2.recipes.resilient [options] -- python -m verl.trainer.main_ppo engine=epfsdp2 ...
"""

import argparse
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from ...engine.errors import SettingError
from ..launch.failure import cause
from ..launch.processes import Interrupted, ProcessTree
from .command import FOLDER, NOTICE, Command, Node, answering, living_nodes

__all__ = ["Run", "check", "main", "parse"]

_HOOK = "trainer.checkpoint_callback_class"
_CALLBACK = f"++{_HOOK}=epfsdp2.recipes.resilient.callback.SaveBeforeTheEnd"
# By default a rank whose peer has died ends its process; this ends the collective alone (torch's ProcessGroupNCCL.hpp).
_ABORT_ONLY = '++ray_kwargs.ray_init.runtime_env.env_vars.TORCH_NCCL_ASYNC_ERROR_HANDLING="2"'
_CONTENTS = "actor_rollout_ref.actor.checkpoint.save_contents"
_SAVE_NEEDS = {"trainer.use_v1": True, "trainer.v1.trainer_mode": "sync", _HOOK: "null"}
_STEP = re.compile(rb"\bstep:(\d+) - .*\n")  # of verl's console logger
_POLL_SECONDS, _SAVE_SECONDS = 5.0, 1000.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; ``command`` has the trainer's words."""
    parser = argparse.ArgumentParser(
        prog="python -m epfsdp2.recipes.resilient",
        description="Run one of verl's trainers, and restart it from its last complete checkpoint when it fails.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--max-restarts", type=int, default=10, help="starts after the first")
    add("--grace-seconds", type=float, default=30.0, help="time for a save after SIGTERM")
    add("--lost-node-seconds", type=float, default=60.0, metavar="S", help="end an attempt that lost a node; 0: never")
    add("--save-on-failure", action="store_true", help="let the living ranks save the last complete step")
    add("--from-scratch", action="store_true", help="start from step 0 if no checkpoint is complete")
    add("--gib", type=float, default=80.0, help="memory of a GPU, for the plan on fewer nodes")
    add("--backoff-seconds", type=float, default=5.0, help="pause before a restart, for nodes to return")
    add("command", nargs="*", help="-- python -m verl.trainer.main_ppo engine=epfsdp2 ...")
    return parser.parse_args(arguments)


def check(command: Command, options: argparse.Namespace) -> None:
    """Raise ``SettingError`` if a run could not resume, or its trainer can't be asked for a save."""
    if _HOOK.rpartition(".")[2] not in command.config["trainer"]:
        raise SettingError(
            _HOOK, None, "the installed verl can't be asked for a save, because it lacks this setting.", "verl 0.9.1"
        )
    setting, anew = command.setting, options.from_scratch
    saves, is_disabled = setting("trainer.save_freq", -1) > 0, setting("trainer.resume_mode") == "disable"
    lacking = sorted({"model", "optimizer", "extra"} - set(setting(_CONTENTS, ()))) if saves else []
    deletes, rule = "trainer.del_local_ckpt_after_load", f"{command.root} holds checkpoints, maybe of another run."
    wrong = [
        ("trainer.save_freq", not saves and not anew, "leaves no checkpoint to resume from.", "20, or --from-scratch"),
        (_CONTENTS, lacking, f"a run can't resume without {', '.join(lacking)}.", "[model,optimizer,extra]"),
        (deletes, setting(deletes), "removes the checkpoint of the next restart.", False),
        ("trainer.resume_mode", is_disabled and command.complete_steps(), rule, "auto, or another folder"),
    ]
    for name, works in _SAVE_NEEDS.items() if options.save_on_failure else ():
        wrong.append((name, setting(name, works) != works, "prevents --save-on-failure.", works))
    for name, is_wrong, rule, works in wrong:
        if is_wrong:
            raise SettingError(name, setting(name), rule, f"{name}={works}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run to the end; return 0 if the run has finished, 1 if it was given up, 2 for refused settings or clusters."""
    try:
        options = parse(arguments)
        command = Command.of(options.command)
        check(command, options)
        with ProcessTree() as tree:
            return Run(options, command, tree).to_the_end()
    except Interrupted as interrupted:
        _say(f"interrupted by {interrupted}; every process of this run has ended")
        return 128 + interrupted.number
    except SettingError as error:
        _say(str(error))
        return 2


def _say(text: str) -> None:
    print(f"[resilient] {text}", file=sys.stderr, flush=True)


class Run:
    """The attempts of a run until it finishes, is given up, or ends after SIGTERM."""

    def __init__(self, options: argparse.Namespace, command: Command, tree: ProcessTree):
        self._options, self._command, self._tree, self._root = options, command, tree, command.root
        self._logs = self._root / "resilient"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._reasons: list[tuple[int, str]] = []  # step and cause of each failure
        self._needed: list[Node] = []  # an attempt can't go on without any of these
        self._sigterm: float | None = None
        self._notice = self._root / NOTICE
        self._notice.unlink(missing_ok=True)

    def save_and_end(self, *_: Any) -> None:
        """Let the run save at the end of its step, and end it; the handler of SIGTERM during an attempt."""
        self._sigterm = self._sigterm or time.time()

    def to_the_end(self) -> int:
        """Return as ``main``. Raises ``SettingError`` if the cluster is too small, ``Interrupted`` after SIGTERM."""
        while True:
            mesh, saved, start = self._mesh(), self._command.complete_steps(), []
            resumed, is_begun = max(saved, default=0), self._reasons or any(self._root.glob("global_step_*"))
            if saved:
                start = ["trainer.resume_mode=resume_path", f'trainer.resume_from_path="{saved[resumed]}"']
            elif is_begun and self._command.setting("trainer.resume_mode") != "resume_path":
                if not self._options.from_scratch:
                    return self._give_up(f"no checkpoint in {self._root} is complete; --from-scratch starts anew")
                start = ["trainer.resume_mode=disable"]
            begins = f"from step {resumed}" if saved else "from the beginning"
            _say(f"starts {'again ' if self._reasons else ''}{begins}: {' '.join([*mesh, *start])}")
            if not (failure := self._attempt([*mesh, *start], resumed)):
                return 0
            step, lines = failure
            _say("\n    ".join([f"step {step} has failed:", *lines]))
            reason = step, re.sub(r"0x\w+|\d+", "#", lines[0])  # without what varies
            if reason in self._reasons:
                return self._give_up(f"step {step} has failed twice for the same reason")
            self._reasons.append(reason)
            if len(self._reasons) > self._options.max_restarts:
                return self._give_up(f"it was restarted {self._options.max_restarts} times (--max-restarts)")
            time.sleep(self._options.backoff_seconds)

    def _attempt(self, overrides: list[str], resumed: int) -> tuple[int, list[str]] | None:
        """Run the command once; return the step that failed and the lines of the cause, None if it has finished."""
        shutil.rmtree(self._root / FOLDER, ignore_errors=True)
        settings = [f'trainer.default_local_dir="{self._root}"']  # absolute, because workers have other folders
        if not self._command.setting(_HOOK):
            settings.append(_CALLBACK)
        if self._options.save_on_failure:
            settings += [f'engine.survivors_folder="{self._root / FOLDER}"', _ABORT_ONLY]
        # A killed vLLM leaves its sockets, which the tree removes with its folder.
        env = {"VLLM_RPC_BASE_PATH": str(self._tree.folder), **os.environ}
        log = self._logs / f"attempt-{1 + len(list(self._logs.iterdir()))}.log"
        answered, lines = dict.fromkeys(self._needed, time.monotonic()), []
        with log.open("w+b") as output:

            def tick() -> None:
                sys.stdout.buffer.write(output.read())
                sys.stdout.flush()
                self._save_at_sigterm()
                self._look_for_lost_nodes(answered)

            outside = signal.signal(signal.SIGTERM, self.save_and_end)
            try:
                if self._tree.run([*self._command.words, *overrides, *settings], env, log, tick) == 0:
                    return None
            except TimeoutError as error:
                lines = [str(error)]
            finally:
                signal.signal(signal.SIGTERM, outside)
        steps = _STEP.findall(log.read_bytes())
        return 1 + (int(steps[-1]) if steps else resumed), [*lines, *cause(log)] or ["it printed nothing"]

    def _mesh(self) -> list[str]:
        """Return the settings of the mesh on the living nodes, none if all live."""
        setting, address = self._command.setting, self._command.address
        if not address:
            return []
        wanted, of_rollout = setting("trainer.nnodes", 1), setting("actor_rollout_ref.rollout.nnodes", 0)
        living = living_nodes(address, "NPU" if setting("trainer.device") == "npu" else "GPU")
        if not living:
            rule = "no Ray cluster answers there, and a run can't continue without the cluster's head node."
            raise SettingError("ray_kwargs.ray_init.address", address, rule, "the address of a cluster that answers")
        there = [node for node in living if node.gpus >= setting("trainer.n_gpus_per_node", 8)]
        nodes = max(0, min(wanted, len(there) - of_rollout))
        count, mesh = nodes, list[str]()
        if nodes < wanted:
            from .mesh import largest_mesh  # takes seconds to import

            count, mesh = largest_mesh(self._command, nodes, self._options.gib)
        # A run can lose a spare node. Nodes behind ray:// can't be reached.
        can_lose = len(there) > count + of_rollout or address.startswith("ray://")
        self._needed = [] if can_lose or not self._options.lost_node_seconds else there
        return mesh

    def _look_for_lost_nodes(self, answered: dict[Node, float]) -> None:
        """Raise ``TimeoutError`` for a lost node, after a save by living ranks; verl 0.9.1 can wait forever for it."""
        now, seconds = time.monotonic(), self._options.lost_node_seconds
        if not answered or now < max(answered.values()) + min(_POLL_SECONDS, seconds / 4):
            return
        answered |= dict.fromkeys(answering(answered), now)
        hosts = [node.host for node, last in answered.items() if now - last > seconds]
        if hosts and self._options.save_on_failure:
            self._notice.write_text(FOLDER)
            deadline = now + _SAVE_SECONDS
            while self._notice.exists() and time.monotonic() < deadline:
                time.sleep(0.2)
            self._notice.unlink(missing_ok=True)
        if hosts:
            raise TimeoutError(f"no answer from {', '.join(hosts)} for {seconds:g} s")

    def _save_at_sigterm(self) -> None:
        """After SIGTERM ask for a save; end the run once verl has noted a complete one, or the grace is over."""
        if self._sigterm is None:
            return
        saved, grace = self._root / "latest_checkpointed_iteration.txt", self._options.grace_seconds
        self._notice.touch()
        # verl empties the file before it writes the step.
        step = saved.read_text() if saved.is_file() and saved.stat().st_mtime > self._sigterm else ""
        if step or time.time() > self._sigterm + grace:
            _say(f"step {step} is saved in {self._root}" if step else f"no save within {grace:g} s")
            self._notice.unlink(missing_ok=True)
            raise Interrupted(signal.SIGTERM)

    def _give_up(self, why: str) -> int:
        _say(f"The run was given up: {why}. The logs are in {self._logs}")
        return 1
