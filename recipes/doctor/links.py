"""Measure collectives within a node and between nodes, and compare them with the hardware's rates."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from .check import Ranks, Row, rate_row

__all__ = ["Card", "card_of", "judge_links", "measure_links", "network_rate"]

_SHARE = 0.6  # of the links' rate; large messages should reach it
_INFINIBAND = Path("/sys/class/infiniband")


class Card(NamedTuple):
    """Published rates of a GPU: GB/s to its node in one direction, bfloat16 TFLOP/s, GB/s of its memory."""

    links: float
    tflops: float
    memory: float


_CARDS = {
    "H100 80GB HBM3": Card(450, 989, 3350),
    "H200": Card(450, 989, 4800),
    "B200": Card(900, 2250, 8000),
    "A100-SXM4-80GB": Card(300, 312, 2039),
}


def card_of(device: str) -> Card | None:
    """Return the published rates of this rank's GPU; None for an unknown one."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((card for known, card in _CARDS.items() if re.search(rf"\b{known}\b", name)), None)


def network_rate(folder: Path = _INFINIBAND) -> float:
    """Return the total GB/s of this node's active InfiniBand and RoCE ports, from sysfs; 0 without any."""
    active = [port for port in folder.glob("*/ports/*") if "ACTIVE" in (port / "state").read_text()]
    return sum(float((port / "rate").read_text().split()[0]) for port in active) / 8  # "400 Gb/sec (4X NDR)"


def measure_links(ranks: Ranks) -> dict[str, float]:
    """Return the GB/s that this rank receives from others in each collective; all groups run it at once."""
    elements = 1 << (27 if ranks.has_gpus else 18)  # 256 MiB in bfloat16
    rates = {}
    for where, size in (("inside", ranks.per_node), ("between", ranks.nodes)):
        if size == 1:
            continue
        group = ranks.inside if where == "inside" else ranks.between
        whole = torch.zeros(elements // size * size, dtype=torch.bfloat16, device=ranks.device)
        received, part = torch.empty_like(whole), whole[: elements // size]
        calls = {
            "all-gather": partial(dist.all_gather_into_tensor, received, part, group=group),
            "all-to-all": partial(dist.all_to_all_single, received, whole, group=group),
        }
        for name, call in calls.items():
            ranks.note(f"{name} {where}")
            rates[f"{name} {where}"] = whole.nbytes * (size - 1) / size / ranks.seconds_of(call) / 1e9
    return rates | {"network": network_rate()}


def judge_links(found: list[Mapping[str, float]], ranks: Ranks) -> Iterator[Row]:
    card, network = card_of(ranks.device), min(each["network"] for each in found) / ranks.per_node
    inside = _SHARE * card.links if card and ranks.has_gpus else None
    wanted = {"inside": inside, "between": _SHARE * network if network and ranks.has_gpus else None}
    slowest: dict[str, float] = {}
    for name in (name for name in found[0] if name != "network"):
        what, where = name.split()
        place = "within a node" if where == "inside" else f"between {ranks.nodes} nodes"
        row = rate_row(f"{what} {place}", [each[name] for each in found], "GB/s", wanted[where], where)
        slowest[where] = min(row.cluster[where], slowest.get(where, float("inf")))
        yield replace(row, cluster={where: slowest[where]})
    if slowest.get("between", 1.0) < slowest.get("inside", 0.0) / 2 and ranks.nodes > 1:
        ratio = slowest["inside"] / slowest["between"]
        setting = f"engine.ep_size={ranks.per_node} or less (a node has {ratio:.0f} times the rate of the network)"
        yield Row("tokens stay within a node", f"ep up to {ranks.per_node}", settings=[setting])
