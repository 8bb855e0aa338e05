"""A trainer's command that prints its settings, saves step 2 and once when asked, and is killed in step 3 at first.

``FAKE_RUN`` is a folder with ``config.json`` and ``template/global_step_0``, a complete step. Each attempt leaves a
socket as a killed vLLM does; ``left.txt`` has it.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import yaml

RUN = Path(os.environ["FAKE_RUN"])


def main() -> None:
    config = json.loads((RUN / "config.json").read_text())
    if "--cfg" in sys.argv:
        print("INFO: something that a library prints")
        print("trainer: 3 of them")
        print(yaml.safe_dump(config))
        return
    root, left = Path(config["trainer"]["default_local_dir"]), RUN / "left.txt"
    is_first, socket = not left.exists(), Path(os.environ["VLLM_RPC_BASE_PATH"]) / f"socket-{os.getpid()}"
    socket.touch()
    with left.open("a") as file:
        file.write(f"{socket}\n")
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    step = int(given.get("trainer.resume_from_path", "_0").strip('"').rpartition("_")[2])
    is_saved = False
    while True:
        step += 1
        if is_first and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
        is_asked = not is_saved and (root / "save_now").exists()
        if step == 2 or is_asked:
            is_saved = is_asked
            shutil.copytree(RUN / "template/global_step_0", root / f"global_step_{step}")
            (root / "latest_checkpointed_iteration.txt").write_text(str(step))
        print(f"(TaskRunner pid=1) step:{step} - reward:1.0", flush=True)


if __name__ == "__main__":
    main()
