"""A trainer's command for tests of ``recipes/resilient``: it prints settings, takes steps, saves, and fails on demand.

``FAKE_RUN`` is a folder. ``plan.json`` in it says how each attempt ends: at a step, with a line of a cause, or by a
signal. What each attempt was started with goes into ``attempts.jsonl`` there.
"""

import json
import os
import signal
import sys
import time
import zlib
from pathlib import Path

import yaml

RUN = Path(os.environ["FAKE_RUN"])


def settings() -> dict:
    config = json.loads((RUN / "config.json").read_text())
    for word in (word for word in sys.argv[1:] if "=" in word):
        name, _, value = word.lstrip("+").partition("=")
        *path, last = name.split(".")
        if not path:
            continue  # chooses a group
        node = config
        for part in path:
            node = node.setdefault(part, {})
        node[last] = json.loads(value) if value[:1] in '"0123456789-[' else value
    return config


def save(root: Path, step: int) -> None:
    actor = root / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    (actor / "weights").write_bytes(b"weights")
    facts = {"weights": {"bytes": 7, "crc32": zlib.crc32(b"weights")}}
    (actor / "epfsdp2_checkpoint.json").write_text(json.dumps({"format": 2, "files": facts}))
    (actor.parent / "data.pt").write_bytes(b"PK\x05\x06" + bytes(18))  # an empty zip
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))


def main() -> None:
    config = settings()
    if "--cfg" in sys.argv:
        print("INFO: something that a library prints")
        print("trainer: 3 of them")
        print(yaml.safe_dump(config))
        return
    trainer, plan = config["trainer"], json.loads((RUN / "plan.json").read_text())
    root, attempts = Path(trainer["default_local_dir"]), RUN / "attempts.jsonl"
    number = len(attempts.read_text().splitlines()) if attempts.exists() else 0
    with attempts.open("a") as file:
        file.write(json.dumps(sys.argv[1:]) + "\n")
    left = Path(os.environ["VLLM_RPC_BASE_PATH"]) / f"socket-{number}"  # as vLLM leaves it where it is killed
    left.touch()
    with (RUN / "left.txt").open("a") as file:
        file.write(f"{left}\n")
    resumed = trainer.get("resume_from_path") if trainer["resume_mode"] == "resume_path" else None
    begun = int(str(resumed).rpartition("_")[2]) if resumed else 0
    fate = plan[number] if number < len(plan) else {}
    for step in range(begun + 1, trainer["total_training_steps"] + 1):
        if step == fate.get("step"):
            (RUN / "nodes.json").write_text(json.dumps(fate.get("nodes", [])))
            if fate.get("hangs"):
                (RUN / "hangs").touch()
                time.sleep(1000)
            if fate.get("signal"):
                os.kill(os.getpid(), getattr(signal, fate["signal"]))
            print(
                f"Traceback (most recent call last):\nRuntimeError: {fate['cause']} at 0x{time.time_ns():x}", flush=True
            )
            raise SystemExit(1)
        time.sleep(fate.get("seconds", 0.01))
        frequency = 1 if (root / "save_now").exists() and not fate.get("deaf") else trainer["save_freq"]
        if frequency > 0 and step % frequency == 0:
            save(root, step)
        print(f"(TaskRunner pid=1) step:{step} - reward:1.0", flush=True)


if __name__ == "__main__":
    main()
