"""Two ranks that save again and again, one of them killed in the middle: ``python save_process.py MODEL OUT MOMENTS``.

Ranks are forked from a process that has imported everything and started no thread, so that many moments take seconds.
Prints a line of JSON for each moment: the step that was being saved, how far into the save, and what loads after.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from epfsdp2.engine.checkpoint import state as checkpoint
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from tests.support.engine.sharded import sharded_model

WORLD = 2
CONTENTS = {"model", "optimizer", "extra"}


def _start(rank: int, store: str, function, *args) -> int:
    """Fork one rank; returns its pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=WORLD)
        function(*args)
        os._exit(0)
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _trainer(folder: Path):
    model, _ = sharded_model(folder, WORLD, 2)
    optimizer = build_multi_optimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-2))
    optimizer.init_state()
    return model, optimizer


def _start_all(function, *args) -> tuple[list[int], int]:
    """Fork all ranks; returns their pids and where to read what the first of them tells."""
    reads, writes = os.pipe()
    store = f"{tempfile.mkdtemp()}/store"
    told = [writes, os.open(os.devnull, os.O_WRONLY)]
    pids = [_start(rank, store, function, *args, told[rank]) for rank in range(WORLD)]
    for descriptor in told:
        os.close(descriptor)
    return pids, reads


def _save_for_ever(folder: Path, out: Path, first: int, told: int) -> None:
    """Save step after step, each with weights that say which; tell the parent when a save begins and has ended."""
    model, optimizer = _trainer(folder)
    for step in range(first, first + 1000):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
        dist.barrier()
        os.write(told, b"b")
        checkpoint.save_checkpoint(out / f"global_step_{step}", model, optimizer, None, CONTENTS, step)
        os.write(told, b"e")


def _load_all(folder: Path, out: Path, told: int) -> None:
    """Load every folder that has a checkpoint's name; tell the parent the steps."""
    model, optimizer = _trainer(folder)
    steps = sorted(int(p.name.removeprefix("global_step_")) for p in out.iterdir() if p.suffix == "")
    for step in steps:
        checkpoint.load_checkpoint(out / f"global_step_{step}", model, optimizer, None, CONTENTS)
        assert all((param.to_local() == step).all() for param in model.parameters())
    os.write(told, json.dumps(steps).encode())


def _wait(pids: list[int]) -> list[int]:
    return [os.waitpid(pid, 0)[1] for pid in pids]


def _killed_once(folder: Path, out: Path, first: int, moment: float) -> dict:
    """One run: two whole saves, then one that is killed after ``moment`` of the time that the second took."""
    pids, reads = _start_all(_save_for_ever, folder, out, first)
    assert os.read(reads, 1) == b"b"
    assert os.read(reads, 1) == b"e"  # the first is slower
    assert os.read(reads, 1) == b"b"
    began = time.monotonic()
    assert os.read(reads, 1) == b"e"
    took = time.monotonic() - began
    assert os.read(reads, 1) == b"b"
    time.sleep(moment * took)
    os.kill(pids[1], signal.SIGKILL)
    time.sleep(0.1)
    os.kill(pids[0], signal.SIGKILL)
    _wait(pids)
    rest = os.read(reads, 1 << 16)  # on a busy machine that save may have ended before the kill, and later ones begun
    os.close(reads)
    pids, reads = _start_all(_load_all, folder, out)
    statuses = _wait(pids)
    steps = json.loads(os.read(reads, 1 << 16) or b"null")
    os.close(reads)
    saving = first + 2 + rest.count(b"b")
    return {"saving": saving, "moment": moment, "seconds": took, "statuses": statuses, "loaded": steps}


def main() -> None:
    folder, out, moments = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    out.mkdir()
    pick = random.Random(0)
    for i in range(moments):
        print(json.dumps(_killed_once(folder, out, 1 + 10 * i, pick.uniform(0, 1.2))), flush=True)


if __name__ == "__main__":
    main()
