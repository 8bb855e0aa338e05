"""Draws the pictures of the README and of docs/tour.md as SVG; standard library only.

python docs/generate.py      # writes them with the other generated pages
"""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["loop", "sync", "update"]

_OURS, _OTHERS, _LINE = "#2f6fde", "#e8eaed", "#5f6368"
_WIDTH, _MARGIN, _GAP, _BOX_HEIGHT = 820, 20, 24, 78


class _Box(NamedTuple):
    """A title, two lines below it, and whether it is this package's."""

    title: str
    first: str
    second: str
    is_ours: bool = True


def loop() -> str:
    """Draw the loop of RL post-training."""
    row = (
        _Box("rollout", "vLLM samples answers", "to the prompts", False),
        _Box("reward", "a function or a model", "scores the answers", False),
        _Box("update", "experts over EP groups,", "all shards by FSDP2"),
        _Box("reshard", "each vLLM worker is sent", "what it keeps"),
    )
    top, height = 46, 218
    bottom, middles = top + _BOX_HEIGHT, [left + _box_width(row) // 2 for left in _lefts(row)]
    parts = [
        *_row(row, top),
        _arrow(f"M{middles[-1]} {bottom + 3} V{bottom + 42} H{middles[0]} V{bottom + 5}"),
        _text(_WIDTH // 2, bottom + 36, "new weights, after every step"),
        _text((middles[0] + middles[1]) // 2, 28, "verl, vLLM and your reward"),
        _text((middles[2] + middles[3]) // 2, 28, "epfsdp2", _OURS, "bold"),
        _text(_WIDTH // 2, height - 14, "verl's trainer runs the loop; engine=epfsdp2 is the only change"),
    ]
    title = "The loop of RL post-training: rollout, reward, update, reshard; epfsdp2 is the last two"
    return _svg(title, height, parts)


def update() -> str:
    """Draw an update: what runs once, and what runs for each micro-batch."""
    once = (
        _Box("settings", "engine/config/roles.py", "checked on the driver"),
        _Box("shard", "engine/parallelize.py", "experts over ep, FSDP2 over all ranks"),
        _Box("load", "engine/checkpoint/load.py", "each rank its own bytes"),
    )
    layer = (
        _Box("gather", "FSDP2, prefetched", "weights of the layer", False),
        _Box("route", "transformers' code", "attention and router", False),
        _Box("dispatch", "engine/moe/dispatch.py", "all-to-all over ep"),
        _Box("compute", "engine/moe/fused.py", "this rank's experts"),
        _Box("combine", "engine/moe/fused.py", "all-to-all over ep"),
    )
    end = (
        _Box("loss", "verl's code", "PPO, GRPO, SFT, ...", False),
        _Box("backward", "autograd", "all-to-alls in reverse", False),
        _Box("reduce", "FSDP2", "sum over ranks / world", False),
        _Box("clip and step", "engine/optim/clip.py", "one norm of all gradients"),
    )
    rows = {
        "once, when the model is built": once,
        "forward: each layer, for each micro-batch": layer,
        "loss to reduce: each micro-batch; clip and step: each mini-batch": end,
    }
    return _rows("An update: settings, sharded model, forward, backward, step", rows)


def sync() -> str:
    """Draw a weight sync: from a trainer rank's shards to the parameters of its vLLM worker."""
    trainer = (
        _Box("export", "engine/integration/engine.py", "verl asks for the weights"),
        _Box("plan", "rollout/sync.py", "once: who sends which rows"),
        _Box("exchange", "rollout/transport/exchange.py", "one all-to-all a round"),
        _Box("send", "rollout/vllm/adapter.py", "buckets in shared memory"),
    )
    worker = (
        _Box("receive", "rollout/vllm/worker.py", "checksums of the first syncs"),
        _Box("place", "rollout/vllm/reload.py", "parameters, elements counted"),
        _Box("process", "vLLM's own code", "a layer when it is complete", False),
    )
    rows = {"on every trainer rank": trainer, "in the vLLM worker beside it": worker}
    return _rows("A weight sync: export, plan, exchange, send; receive, place, process", rows)


def _rows(title: str, rows: dict[str, Sequence[_Box]]) -> str:
    """Draw rows of boxes one below the other, in one path, each with a label above."""
    parts, top, step = [], 38, _BOX_HEIGHT + 56
    boxes = list(rows.values())
    for number, (label, row) in enumerate(rows.items()):
        beside_arrow = _MARGIN + _box_width(row) // 2 + 12
        parts += [_text(beside_arrow, top - 10, label, anchor="start"), *_row(row, top)]
        if number + 1 < len(rows):
            start, end = _WIDTH - _MARGIN - _box_width(row) // 2, _MARGIN + _box_width(boxes[number + 1]) // 2
            bottom = top + _BOX_HEIGHT
            parts.append(_arrow(f"M{start} {bottom + 3} V{bottom + 16} H{end} V{top + step - 3}"))
        top += step
    return _svg(title, top - 44, parts)


def _box_width(row: Sequence[_Box]) -> int:
    return (_WIDTH - 2 * _MARGIN - _GAP * (len(row) - 1)) // len(row)


def _lefts(row: Sequence[_Box]) -> list[int]:
    return [_MARGIN + i * (_box_width(row) + _GAP) for i in range(len(row))]


def _row(row: Sequence[_Box], top: int) -> list[str]:
    width, lefts = _box_width(row), _lefts(row)
    parts = []
    for left, box in zip(lefts, row, strict=True):
        fill, colour = (_OURS, "#ffffff") if box.is_ours else (_OTHERS, "#202124")
        parts += [
            f'<rect x="{left}" y="{top}" width="{width}" height="{_BOX_HEIGHT}" rx="8" fill="{fill}"/>',
            _text(left + width // 2, top + 26, box.title, colour, "bold", 16),
            _text(left + width // 2, top + 47, box.first, colour, size=11),
            _text(left + width // 2, top + 64, box.second, colour, size=11),
        ]
    middle = top + _BOX_HEIGHT // 2
    return parts + [_arrow(f"M{left - _GAP + 3} {middle} H{left - 3}") for left in lefts[1:]]


def _text(
    x: int, y: int, text: str, fill: str = _LINE, weight: str = "normal", size: int = 13, anchor: str = "middle"
) -> str:
    style = f'fill="{fill}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{text}</text>'


def _arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{_LINE}" stroke-width="2" marker-end="url(#tip)"/>'


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f"<title>{title}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{_LINE}"/></marker></defs>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
