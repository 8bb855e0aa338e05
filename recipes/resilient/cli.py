"""Restart a failed run from its last complete checkpoint, on the remaining nodes.

    python -m epfsdp2.recipes.resilient [options] -- python -m verl.trainer.main_ppo engine=epfsdp2 ...

After a failure the nodes of the Ray cluster are counted again. If some are gone, the run continues with the same
batch on the largest mesh that fits.
"""

import argparse
import itertools
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence

from ...engine.errors import SettingError
from ..quickstart.failure import cause
from ..quickstart.processes import Interrupted, ProcessTree
from .checkpoints import FOLDER, NOTICE, latest
from .cluster import LostNodes, Node, NodesLostError, address_of, living_nodes
from .command import Command

__all__ = ["Run", "check", "main", "parse"]

_CALLBACK = "++trainer.checkpoint_callback_class=epfsdp2.recipes.resilient.callback.SaveBeforeTheEnd"
# By default a rank whose peer has died ends its process; this ends the collective alone (torch's ProcessGroupNCCL.hpp).
_ABORT_ONLY = '++ray_kwargs.ray_init.runtime_env.env_vars.TORCH_NCCL_ASYNC_ERROR_HANDLING="2"'
_CONTENTS = "actor_rollout_ref.actor.checkpoint.save_contents"
_TRACKER = "latest_checkpointed_iteration.txt"  # verl writes it when a save is complete
_STEP = re.compile(rb"\bstep:(\d+) - .*\n")  # of verl's console logger
# Parts in which two failures of one cause differ: addresses, ids, numbers.
_VARYING = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{16,}\b|\d+(?:\.\d+)*", re.IGNORECASE)
_POLL_SECONDS, _LONGEST_PAUSE, _SAVE_SECONDS = 5.0, 300.0, 1000.0


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
    add("--wait-for-nodes", type=float, default=0.0, metavar="S", help="seconds to wait for lost nodes")
    add("--lost-node-seconds", type=float, default=60.0, metavar="S", help="end an attempt that lost a node; 0: never")
    add("--save-on-failure", action="store_true", help="let the living ranks save the last complete step")
    add("--from-scratch", action="store_true", help="start from step 0 if no checkpoint is complete")
    add("--gib", type=float, help="memory of a GPU, for the plan on fewer nodes; by default 80, on CPUs the host's")
    pause = "pause before a restart; doubles up to 300 while no step is saved"
    add("--backoff-seconds", type=float, default=5.0, help=pause)
    add("command", nargs=argparse.REMAINDER, help="-- python -m verl.trainer.main_ppo engine=epfsdp2 ...")
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:
        del options.command[0]
    return options


def check(command: Command, options: argparse.Namespace) -> None:
    """Raise ``SettingError`` if a run could not resume, or its trainer can't save after a failure."""
    setting = command.setting

    def refuse(name: str, rule: str, works: str) -> None:
        raise SettingError(name, setting(name), rule, works)

    saves = setting("trainer.save_freq", -1) > 0
    if not saves and not options.from_scratch:
        works = "trainer.save_freq=20; or --from-scratch, which starts from step 0 each time"
        refuse("trainer.save_freq", "there will be no checkpoint to resume from.", works)
    if saves and (lacking := sorted({"model", "optimizer", "extra"} - set(setting(_CONTENTS, ())))):
        works = f"{_CONTENTS}=[model,optimizer,extra]"
        refuse(_CONTENTS, f"a run can't resume without {', '.join(lacking)}.", works)
    if setting(name := "trainer.del_local_ckpt_after_load"):
        refuse(name, "removes the checkpoint of the next restart.", f"{name}=False")
    if command.saved_steps() and setting("trainer.resume_mode") == "disable":
        rule = f"{command.root} holds checkpoints, and a restart can't know whether they are of this run."
        refuse("trainer.resume_mode", rule, "trainer.resume_mode=auto, or a folder of its own")
    if options.save_on_failure and (command.saves_queue or not setting("trainer.use_v1", True)):
        rule = "with --save-on-failure: no rank has the prompts in flight, or the trainer does not report a failure."
        refuse("trainer.v1.trainer_mode", rule, "trainer.use_v1=True trainer.v1.trainer_mode=sync")
    if options.save_on_failure and setting("trainer.checkpoint_callback_class"):
        rule = "replaces the callback that --save-on-failure needs."
        refuse("trainer.checkpoint_callback_class", rule, "a command without it")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run to the end; return 0 if the run has finished, 1 if it was given up, 2 for refused settings."""
    try:
        options = parse(arguments)
        command = Command.of(options.command)
        check(command, options)
        with ProcessTree() as tree:
            run = Run(options, command, tree)
            signal.signal(signal.SIGTERM, lambda *_: run.save_and_end())
            return run.to_the_end()
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
        self._stuck = 0  # failures since the last save
        self._needed: list[Node] = []  # an attempt can't go on without any of these
        self._sigterm: float | None = None
        (self._root / NOTICE).unlink(missing_ok=True)

    def save_and_end(self) -> None:
        """Let the run save at the end of its step, and end it; the handler of SIGTERM."""
        self._sigterm = self._sigterm or time.time()

    def to_the_end(self) -> int:
        """Return 0 if the run has finished, 1 if it was given up.

        Raises ``SettingError`` if the cluster is too small for the first attempt, and ``Interrupted`` after SIGTERM.
        """
        resumed: int | None = None
        while True:
            try:
                mesh = self._mesh()
            except SettingError as error:
                if not self._reasons:
                    raise
                return self._give_up(str(error))
            found, start = self._command.saved_steps(), []
            saved = latest(found)
            if saved:
                start = ["trainer.resume_mode=resume_path", f'trainer.resume_from_path="{saved.folder}"']
            elif (self._reasons or found) and self._command.setting("trainer.resume_mode") != "resume_path":
                if not self._options.from_scratch:
                    why = "".join(f" ({each.folder.name}: {each.fault})" for each in found[-1:])
                    return self._give_up(f"no checkpoint in {self._root} is complete{why}; --from-scratch starts anew")
                start = ["trainer.resume_mode=disable"]
            if self._reasons:
                self._stuck = 1 if saved and saved.step != resumed else self._stuck + 1
                pause = min(_LONGEST_PAUSE, self._options.backoff_seconds * 2 ** (self._stuck - 1))
                _say(f"a pause of {pause:g} s")
                self._pause(pause)
            if self._reasons or mesh or start:
                begins = f"from step {saved.step}" if saved else "from the beginning"
                _say(f"starts {'again ' if self._reasons else ''}{begins}: {' '.join([*mesh, *start])}")
            resumed = saved.step if saved else None
            failure = self._attempt([*mesh, *start], resumed or 0)
            if failure is None:
                return 0
            step, lines = failure
            _say("\n    ".join([f"step {step} has failed:", *lines]))
            reason = step, _VARYING.sub("#", lines[0].strip())
            if reason in self._reasons:
                return self._give_up(f"step {step} has failed twice for the same reason")
            self._reasons.append(reason)
            if len(self._reasons) > self._options.max_restarts:
                return self._give_up(f"it was restarted {self._options.max_restarts} times (--max-restarts)")

    def _attempt(self, overrides: list[str], resumed: int) -> tuple[int, list[str]] | None:
        """Run the command once; return the step that failed and the lines of the cause, None if it has finished."""
        shutil.rmtree(self._root / FOLDER, ignore_errors=True)
        settings = [f'trainer.default_local_dir="{self._root}"']  # absolute, because workers have other folders
        settings += [] if self._command.setting("trainer.checkpoint_callback_class") else [_CALLBACK]
        if self._options.save_on_failure:
            settings += [f'engine.survivors_folder="{self._root / FOLDER}"', _ABORT_ONLY]
        # A killed vLLM leaves its sockets, which the tree removes with its folder.
        env = {"VLLM_RPC_BASE_PATH": str(self._tree.folder), **os.environ}
        logs = (self._logs / f"attempt-{number}.log" for number in itertools.count(1))
        log = next(path for path in logs if not path.exists())
        log.touch()
        lost, lines = LostNodes(self._needed, self._options.lost_node_seconds), []
        with log.open("rb") as output:

            def tick() -> None:
                sys.stdout.buffer.write(output.read())
                sys.stdout.flush()
                self._save_at_sigterm()
                if (hosts := lost.hosts()) and self._options.save_on_failure:
                    self._save_by_survivors()
                if hosts:
                    seconds = self._options.lost_node_seconds
                    raise NodesLostError(f"no answer from {', '.join(hosts)} for {seconds:g} s")

            try:
                if self._tree.run([*self._command.words, *overrides, *settings], env, log, tick) == 0:
                    return None
            except NodesLostError as error:
                lines = [str(error)]
        steps = _STEP.findall(log.read_bytes())
        return 1 + (int(steps[-1]) if steps else resumed), [*lines, *cause(log)] or ["it printed nothing"]

    def _mesh(self) -> list[str]:
        """Wait for lost nodes; return the settings of the mesh on the living ones, none if all live."""
        setting, address = self._command.setting, address_of(self._command)
        if address is None:
            return []
        wanted, of_rollout = setting("trainer.nnodes", 1), setting("actor_rollout_ref.rollout.nnodes", 0)
        resource = "NPU" if setting("trainer.device") == "npu" else "GPU"
        deadline, before = time.monotonic() + self._options.wait_for_nodes, wanted
        while True:
            living = living_nodes(address, resource)
            there = [node for node in living if node.gpus >= setting("trainer.n_gpus_per_node", 8)]
            nodes = max(0, min(wanted, len(there) - of_rollout))
            if nodes != before:
                _say(f"{nodes} of the run's {wanted} nodes are there")
            before, left = nodes, deadline - time.monotonic()
            if nodes == wanted or left <= 0:
                break
            self._pause(min(_POLL_SECONDS, left))
        if not living:
            rule = "no Ray cluster answers there, and a run can't go on without the cluster's head node."
            works = "the address of a cluster that answers, and --wait-for-nodes 600 for one that is started again"
            raise SettingError("ray_kwargs.ray_init.address", address, rule, works)
        count, mesh = nodes, list[str]()
        if nodes < wanted:
            from .mesh import largest_mesh  # takes seconds to import

            count, mesh = largest_mesh(self._command, nodes, self._options.gib)
        # A run can lose a spare node. Nodes behind ray:// can't be reached.
        can_lose = len(there) > count + of_rollout or address.startswith("ray://")
        self._needed = [] if can_lose else there
        return mesh

    def _save_at_sigterm(self) -> None:
        """After SIGTERM ask for a save; end the run once it has saved or the grace is over."""
        if self._sigterm is None:
            return
        notice, tracker, grace = self._root / NOTICE, self._root / _TRACKER, self._options.grace_seconds
        if not notice.exists():
            _say(f"SIGTERM: the run saves at the end of its step, within {grace:g} s (--grace-seconds)")
            notice.touch()
        saved = latest(self._command.saved_steps())
        if saved and tracker.is_file() and tracker.stat().st_mtime > self._sigterm:
            _say(f"step {saved.step} is saved in {saved.folder}")
        elif time.time() < self._sigterm + grace:
            return
        else:
            _say(f"no save within {grace:g} s; the last one is {saved.folder if saved else 'none'}")
        notice.unlink(missing_ok=True)
        raise Interrupted(signal.SIGTERM)

    def _save_by_survivors(self) -> None:
        """Ask the trainer of a run that may hang for a save, and wait until it has tried."""
        notice, deadline = self._root / NOTICE, time.monotonic() + _SAVE_SECONDS
        notice.write_text(FOLDER)
        while notice.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        notice.unlink(missing_ok=True)

    def _pause(self, seconds: float) -> None:
        """Sleep; SIGTERM ends the run, which has nothing to save now."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._sigterm is not None:
                raise Interrupted(signal.SIGTERM)
            time.sleep(min(0.2, left))

    def _give_up(self, why: str) -> int:
        _say(f"The run was given up: {why}. The logs are in {self._logs}")
        return 1
