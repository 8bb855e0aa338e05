"""As much of Ray as ``recipes/resilient`` asks: the GPUs of the nodes that live, from a file of the test.

A negative number is a node of which Ray has not found out yet that it is gone.
"""

import json
import os
import socket
from pathlib import Path

_listens = socket.create_server(("127.0.0.1", 0))
_closed = socket.create_server(("127.0.0.1", 0))
_GONE = _closed.getsockname()[1]
_closed.close()


def init(**_) -> None: ...


def nodes() -> list[dict]:
    gpus = json.loads((Path(os.environ["FAKE_RUN"]) / "nodes.json").read_text())
    return [_node(8, _GONE, alive=False), *(_node(count, _GONE if count < 0 else None) for count in gpus)]


def _node(gpus: int, port: int | None, alive: bool = True) -> dict:
    place = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port or _listens.getsockname()[1]}
    return {"Alive": alive, "Resources": {"GPU": float(abs(gpus))}, **place}
