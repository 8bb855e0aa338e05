"""Tiny checkpoints, and real vLLM engines in processes of their own, as a trainer sends them weights."""

import asyncio
import concurrent.futures
import contextlib
import functools
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Listener
from pathlib import Path
from unittest import mock

import psutil
import pytest

from epfsdp2.engine.cleanup import held_by, remove_unused
from epfsdp2.engine.compat import versions
from epfsdp2.rollout.vllm import names
from tests.support.rollout import verify

__all__ = [
    "Checkpoint",
    "Engine",
    "as_taken",
    "make_checkpoint",
    "no_segments_are_left",
    "one_by_one",
    "segments_identity",
]

# Where the program of an engine's process is, and the extensions that tests give to workers.
ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "rollout" / "vllm_workers"
READABLE = "tests.support.rollout.vllm_extension.ReadableWorker"
PROMPTS = [[5, 6, 7, 8], [9, 3, 100, 42, 17, 150], [199]]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class Checkpoint:
    """A tiny Qwen3-MoE on disk, and its weights as a trainer sends them (experts fused)."""

    path: str
    config: object
    weights: dict


def one_by_one(name: str, stack):
    """Yield the names and matrices that a checkpoint has for a stack of experts."""
    prefix, _, kind = name.rpartition(".")
    for expert, matrix in enumerate(stack):
        parts = zip(("gate", "up"), matrix.chunk(2), strict=True) if kind == "gate_up_proj" else [("down", matrix)]
        yield from ((f"{prefix}.{expert}.{part}_proj.weight", values) for part, values in parts)


def as_taken(weights):
    """Yield weights under names that the installed vLLM accepts: before 0.27 no stacks of experts."""
    for name, tensor in weights:
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")) and not names._takes_stacks():
            yield from one_by_one(name, tensor)
        else:
            yield name, tensor


def make_checkpoint(path: Path, seed: int, tied: bool = False) -> Checkpoint:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from tests.support.models.published import save_published

    # hidden != 2 x intermediate, so that a transposed expert can't pass; the vocabulary is padded.
    config = Qwen3MoeConfig(
        vocab_size=200,
        hidden_size=96,
        intermediate_size=128,
        # Halved between two workers, 32 is padded back to the 32 rows that the CPU kernel works on; 0.24 pads nothing.
        moe_intermediate_size=32 if tied and versions.vllm_in(">=0.27") else 64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=0.0 if parameter.dim() > 1 else 1.0, std=0.2, generator=generator)
    save_published(model, Path(path), seed)
    return Checkpoint(str(path), config, {name: p.detach() for name, p in model.named_parameters()})


class Engine:
    """One vLLM engine: remote calls, generation, and weight syncs over verl's real transport.

    Args:
        environment: more of the process's environment variables.
        settings: more of vLLM's, beside those of ``vllm_process.py``.
    """

    def __init__(
        self, model: str, tp_size: int = 1, extension: str = READABLE, environment: dict | None = None, **settings
    ):
        self.job = f"test{os.getpid()}x{id(self)}"
        self.tp_size = tp_size
        self._buckets_before = set(glob.glob("/dev/shm/verl_weights_*"))  # other jobs'
        self._folder = Path(tempfile.mkdtemp())
        self._log, socket = self._folder / "log", str(self._folder / "socket")
        self._log.touch()
        self._listener = Listener(socket)
        settings |= {"model": model, "tensor_parallel_size": tp_size, "worker_extension_cls": extension}
        paths = os.pathsep.join(filter(None, [str(FOLDER), str(ROOT), (environment or {}).get("PYTHONPATH")]))
        environment = {**_ENVIRONMENT, **(environment or {}), "PYTHONPATH": paths}
        request = {"socket": socket, "settings": settings, "log": str(self._log)}
        own = {"VERL_RAY_JOB_ID": self.job, "VLLM_RPC_BASE_PATH": str(self._folder)}
        request["environment"] = {**os.environ, **environment, **own}
        self.process = _forked(request, environment)
        # One thread, so that calls come one after the other; the first waits for the engine.
        self._calls = concurrent.futures.ThreadPoolExecutor(1)
        self._held: set[str] = set()
        try:
            self._connection = self._calls.submit(self._accept).result(timeout=540)
            self._held = self._holds()  # some tests kill workers
        except Exception:
            self.stop()
            raise

    def _accept(self):
        socket = self._listener._listener._socket
        socket.settimeout(1)
        deadline = time.monotonic() + 500
        while True:
            try:
                connection = self._listener.accept()
                break
            except TimeoutError:
                if not self.process.is_running() or time.monotonic() > deadline:
                    raise RuntimeError(f"vLLM did not start\n{self.log()}") from None
        connection.recv()
        return connection

    def _ask(self, command, arguments, timeout):
        self._connection.send((command, arguments))
        if not self._connection.poll(timeout):
            raise TimeoutError(f"{command}: no answer within {timeout} s\n{self.log()}")
        kind, answer = self._connection.recv()
        if kind == "error":
            raise RuntimeError(answer)
        return answer

    def call(self, command: str, timeout: float = 60.0, **arguments) -> concurrent.futures.Future:
        return self._calls.submit(self._ask, command, arguments, timeout)

    def generate(self):
        return self.generating().result()

    def generating(
        self, prompts: list | None = None, adapter: tuple | None = None, **sampling
    ) -> concurrent.futures.Future:
        """Start to generate from ids or other prompts of vLLM, with an adapter's name, number and folder.

        Args:
            sampling: more of vLLM's ``SamplingParams``; greedy by default.
        """
        return self.call("generate", prompts=prompts or PROMPTS, adapter=adapter, sampling=sampling)

    def digests(self) -> list[dict]:
        return [answer["digests"] for answer in self.call("epfsdp2_digests").result()]

    def difference(self, checkpoint: Checkpoint, weights: dict | None = None) -> str:
        """Describe how the workers' weights differ from a checkpoint's (or from ``weights``); empty if they do not."""
        found = self.digests()
        assert len(found) == self.tp_size
        state = checkpoint.weights if weights is None else weights
        reports = [
            verify.compare(verify.expected_digests(state, checkpoint.config, self.tp_size, rank), digests)
            for rank, digests in enumerate(found)
        ]
        return "\n".join(filter(None, reports))

    def handle(self, rank: int = 0) -> str:
        return f"ipc:///tmp/rl-colocate-zmq-{self.job}-replica-0-rank-{rank}.sock"

    def sync(self, weights, timeout_seconds: float = 30.0, verify: bool = False) -> None:
        """Send weights by a thread for each worker; the first thread also watches the receiving call.

        Args:
            weights: returns the tensors of a rank.
            verify: whether the workers compare checksums.
        """
        from epfsdp2.rollout.vllm import adapter

        receiving = self.call(
            "update_weights_from_ipc", use_shm=True, sync_timeout_seconds=timeout_seconds, verify=verify
        )

        async def send(rank: int):
            future = asyncio.wrap_future(receiving) if rank == 0 else None
            if future is not None:  # nobody may wait for it once the sender has failed
                future.add_done_callback(lambda done: done.cancelled() or done.exception())
            await adapter.send_weights(
                as_taken(weights(rank)),
                zmq_handle=self.handle(rank),
                bucket_megabytes=1,
                use_shm=True,
                timeout_seconds=timeout_seconds,
                rank=rank,
                future=future,
            )

        def failure(future):  # which is no reference of Ray's
            return None if future is None or not receiving.done() else receiving.exception()

        patched = mock.patch.object(adapter, "_failure_of_call", failure)
        with patched, concurrent.futures.ThreadPoolExecutor(self.tp_size) as senders:
            results = [senders.submit(asyncio.run, send(rank)) for rank in range(self.tp_size)]
        for result in results:
            result.result()

    def leftovers(self) -> list[str]:
        buckets = set(glob.glob("/dev/shm/verl_weights_*")) - self._buckets_before
        return sorted(buckets) + glob.glob(f"/tmp/rl-colocate-zmq-{self.job}-*")

    def _holds(self) -> set[str]:
        return held_by([self.process.pid, *(child.pid for child in self._family())])

    def _family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return self.process.children(recursive=True)
        return []

    def workers(self) -> list[int]:
        # Forked ones have this engine's command line; vLLM titles them where it can. The resource tracker has neither.
        words = ("vllm_process.py", "Worker")
        commands = {child.pid: " ".join([*child.cmdline(), child.name()]) for child in self._family()}
        return [pid for pid, command in commands.items() if any(word in command for word in words)]

    def log(self) -> str:
        return self._log.read_text()[-4000:]

    def stop(self) -> None:
        """End the process; segments of workers that could not remove them are removed."""
        held = self._held | self._holds()
        if self.process.is_running():
            with contextlib.suppress(OSError, psutil.TimeoutExpired, AttributeError):
                self._connection.send(("exit", None))
                self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        remove_unused(held)
        self._calls.shutdown(wait=False)
        self._listener.close()
        shutil.rmtree(self._folder)


@functools.cache
def _forking(environment: tuple[tuple[str, str], ...]) -> subprocess.Popen:
    """Start the process that engines with these variables are forked from; it ends with this one."""
    program = [sys.executable, str(FOLDER / "vllm_process.py")]
    pipe = subprocess.PIPE
    return subprocess.Popen(program, env={**os.environ, **dict(environment)}, stdin=pipe, stdout=pipe, text=True)


def _forked(request: dict, environment: dict) -> psutil.Process:
    """Start an engine's process by a request to ``vllm_process.py``."""
    forking = _forking(tuple(sorted(environment.items())))
    forking.stdin.write(json.dumps(request) + "\n")
    forking.stdin.flush()
    pid = forking.stdout.readline()
    if not pid:
        raise RuntimeError("the process that engines are forked from has ended, with its reason above")
    return psutil.Process(int(pid))


def segments_identity(folder) -> str:
    """Return the prefix of vLLM's shared-memory segments (``VLLM_DIST_IDENT``) in processes of a test."""
    return str(folder).replace("/", ".")


@pytest.fixture(autouse=True)
def no_segments_are_left(tmp_path):
    """Remove the segments of ranks that could not, in each module that imports this."""
    yield
    for path in glob.glob(f"/dev/shm/{segments_identity(tmp_path)}-*"):
        os.unlink(path)
