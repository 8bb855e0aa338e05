"""As much of Ray as ``recipes/resilient`` asks: the GPUs of the nodes that live, from a file of the test.

A negative number is a node of which Ray has not found out yet that it is gone; a pair is GPUs and a port.
"""

import json
import os
import socket
from pathlib import Path

_closed = socket.create_server(("127.0.0.1", 0))
_GONE = _closed.getsockname()[1]
_closed.close()


def init(**_) -> None: ...


def nodes() -> list[dict]:
    gpus = json.loads((Path(os.environ["FAKE_RUN"]) / "nodes.json").read_text())
    return [_node(8, _GONE, alive=False), *(_node(*(one if isinstance(one, list) else [one])) for one in gpus)]


def _node(gpus: int, port: int | None = None, alive: bool = True) -> dict:
    port = port or (_GONE if gpus < 0 else int(os.environ["FAKE_NODE_PORT"]))
    place = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
    return {"Alive": alive, "Resources": {"GPU": float(abs(gpus))}, **place}
