"""Draws docs/loop.svg, the loop of RL post-training with this package's part coloured; standard library only.

python docs/generate.py      # writes it with the other generated pages
"""

__all__ = ["loop"]

_OURS, _OTHERS, _LINE = "#2f6fde", "#e8eaed", "#5f6368"
_WIDTH, _HEIGHT = 820, 232
_BOX_WIDTH, _BOX_HEIGHT, _TOP, _GAP = 170, 92, 46, 34
# Title, two lines below it, whether it is this package's.
_BOXES = (
    ("rollout", "vLLM samples answers", "to the prompts", False),
    ("reward", "a function or a model", "scores the answers", False),
    ("update", "experts over EP groups,", "all shards by FSDP2", True),
    ("reshard", "each vLLM worker is sent", "what it keeps", True),
)


def loop() -> str:
    """The picture as SVG; the same text every time."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="13" text-anchor="middle">',
        "<title>The loop of RL post-training: rollout, reward, update, reshard; epfsdp2 is the last two</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{_LINE}"/></marker></defs>',
    ]
    lefts = [20 + i * (_BOX_WIDTH + _GAP) for i in range(len(_BOXES))]
    middle, bottom = _TOP + _BOX_HEIGHT // 2, _TOP + _BOX_HEIGHT
    for left, (title, first, second, ours) in zip(lefts, _BOXES, strict=True):
        fill, text = (_OURS, "#ffffff") if ours else (_OTHERS, "#202124")
        centre = left + _BOX_WIDTH // 2
        parts += [
            f'<rect x="{left}" y="{_TOP}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="8" fill="{fill}"/>',
            f'<text x="{centre}" y="{_TOP + 30}" fill="{text}" font-size="18" font-weight="bold">{title}</text>',
            f'<text x="{centre}" y="{_TOP + 56}" fill="{text}">{first}</text>',
            f'<text x="{centre}" y="{_TOP + 74}" fill="{text}">{second}</text>',
        ]
    ends = [(left + _BOX_WIDTH, right) for left, right in zip(lefts, lefts[1:], strict=False)]
    parts += [_arrow(f"M{start + 3} {middle} H{end - 3}") for start, end in ends]
    first, last = (left + _BOX_WIDTH // 2 for left in (lefts[0], lefts[-1]))
    parts += [
        _arrow(f"M{last} {bottom + 3} V{bottom + 42} H{first} V{bottom + 5}"),
        f'<text x="{_WIDTH // 2}" y="{bottom + 36}" fill="{_LINE}">new weights, after every step</text>',
        f'<text x="{(lefts[0] + lefts[1] + _BOX_WIDTH) // 2}" y="28" fill="{_LINE}">verl, vLLM and your reward</text>',
        f'<text x="{(lefts[2] + lefts[3] + _BOX_WIDTH) // 2}" y="28" fill="{_OURS}" font-weight="bold">epfsdp2</text>',
        f'<text x="{_WIDTH // 2}" y="{_HEIGHT - 14}" fill="{_LINE}">verl\'s trainer runs the loop; engine=epfsdp2 is '
        "the only change on its command line</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{_LINE}" stroke-width="2" marker-end="url(#tip)"/>'
