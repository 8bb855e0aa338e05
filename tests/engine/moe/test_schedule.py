"""The launches of a layer, in order and by stream: compute, all-to-alls (``ep``), copies of sizes to the host.

Ranks are real and their device is not: a stand-in for its streams notes where each of them is used.
"""

import contextlib
from unittest.mock import patch

import torch
import torch.distributed as dist

from epfsdp2.engine.moe import forward, fused, overlap
from epfsdp2.engine.moe.collectives import counts
from tests.support.engine.recorder import Recorder
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import VOCAB, save_glm4_moe, save_qwen3_moe, token_loss
from tests.support.ranks import run_ranks

CHUNKS = 2
OVERLAP = {"dispatch_chunks": CHUNKS, "overlap_shared_experts": True}
# Forward beside backward. Without chunks the compute stream waits for an all-to-all where it is issued.
_AT_ONCE = """
ep: counts                | compute: gradient of shared experts
copies: wait for counts   | ep: gradient of combine 0
copies: sizes to the host | compute: gradient of experts 0
compute: gather rows 0    | ep: gradient of dispatch 0
host: wait for the sizes  |
ep: dispatch 0            |
compute: experts 0        |
ep: combine 0             |
compute: shared experts   |
"""
# Two chunks, and shared experts, which follow the dispatches because NCCL waits for earlier compute.
_CHUNKED = """
ep: counts                   | ep: gradient of combine 1
copies: wait for counts      | ep: gradient of combine 0
copies: sizes to the host    | compute: wait for gradient of combine 1
compute: gather rows 0       | compute: gradient of experts 1
compute: gather rows 1       | ep: gradient of dispatch 1
host: wait for the sizes     | compute: wait for gradient of combine 0
ep: dispatch 0               | compute: gradient of experts 0
ep: dispatch 1               | ep: gradient of dispatch 0
compute: shared experts      | compute: gradient of shared experts
compute: wait for dispatch 0 | compute: wait for gradient of dispatch 1
compute: experts 0           | compute: wait for gradient of dispatch 0
ep: combine 0                |
compute: wait for dispatch 1 |
compute: experts 1           |
ep: combine 1                |
compute: wait for combine 0  |
compute: wait for combine 1  |
"""


class _Streams:
    """A device module and a side stream of it, as ``counts.py`` uses them."""

    def __init__(self, note):
        self.note, self.current = note, "compute"

    def current_stream(self):
        return self.current

    def wait_stream(self, stream):
        assert stream == "compute", "its memory is reused in the order of this stream"

    @contextlib.contextmanager
    def stream(self, stream):
        self.current, before = "copies", self.current
        yield
        self.current = before

    def Event(self):
        return self

    def record(self):
        self.note(f"{self.current}: sizes to the host")

    def synchronize(self):
        self.note("host: wait for the sizes")


class _Schedule(Recorder):
    """Records also what the experts and shared experts of layers launch."""

    def __init__(self, model, chunks):
        super().__init__(model)
        self.names, self.exchanged, self.groups, self.gathered = _exchanges(chunks), 0, [], 0
        self.chunks, self.streams = chunks, _Streams(self._note)
        for i, layer in enumerate(model.model.layers):
            self._watch(layer.self_attn, f"attention {i}")
            if hasattr(layer.mlp, "shared_experts"):
                self._watch(layer.mlp.shared_experts.down_proj, "shared experts")

    def _note(self, launch):
        self.events.append(("schedule", launch))

    def _watch(self, module, name):
        def after(module, args, output):
            self._note(f"compute: {name}")
            out = output[0] if isinstance(output, tuple) else output
            out.register_hook(lambda grad: self._note(f"compute: gradient of {name}"))

        module.register_forward_hook(after)

    def __enter__(self):
        super().__enter__()
        exchange, gather = dist.all_to_all_single, overlap.to_slots
        up, down = fused.Experts.forward_up, fused.Experts.backward

        def all_to_all(output, *args, async_op=False, **kwargs):
            work = exchange(output, *args, async_op=async_op, **kwargs)
            self.events.pop()
            if output.dim() == 1:  # routing weights, which go with the rows
                return work
            name = "counts"
            if output.dtype != torch.int64:
                name = self.names[self.exchanged % len(self.names)]
                self.exchanged += 1
            self._note(f"ep: {name}")
            return _Awaited(work, lambda: self._note(f"{self.streams.current}: wait for {name}")) if async_op else work

        def to_slots(*args):
            self._note(f"compute: gather rows {self.gathered % self.chunks}")
            self.gathered += 1
            return gather(*args)

        def forward_up(experts, rows, groups):
            self._note(f"compute: experts {len(self.groups) % self.chunks}")
            self.groups.append(groups)
            return up(experts, rows, groups)

        def backward(experts, pre, grad, groups, *args):
            number = next(i for i, known in enumerate(self.groups) if known is groups)
            self._note(f"compute: gradient of experts {number % self.chunks}")
            return down(experts, pre, grad, groups, *args)

        for patched in (
            patch.object(dist, "all_to_all_single", all_to_all),
            patch.object(overlap, "to_slots", to_slots),
            patch.object(forward, "to_slots", to_slots),
            patch.object(fused.Experts, "forward_up", forward_up),
            patch.object(fused.Experts, "backward", backward),
            patch.object(torch, "get_device_module", lambda device: self.streams),
            patch.object(counts, "_copies", lambda device: self.streams),
        ):
            patched.start()
            self.patches.insert(0, patched)
        return self


def _exchanges(chunks):
    """Names of a layer's all-to-alls of rows in their order."""
    ways = [f"{way} {i}" for way in ("dispatch", "combine") for i in range(chunks)]
    return ways + [f"gradient of {way}" for way in reversed(ways)]


class _Awaited:
    """A collective that says when it is waited for."""

    def __init__(self, work, note):
        self.work, self.note = work, note

    def wait(self):
        self.note()
        return self.work.wait()


def _recorded(folder, ep, **options):
    """Return the events of one step, which are equal on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, _ = sharded_model(folder, world, ep, **options)
    model.train()
    with _Schedule(model, options.get("dispatch_chunks", 1)) as schedule:
        ids = torch.randint(0, VOCAB, (1, 5 + 7 * rank), generator=torch.Generator().manual_seed(rank))
        token_loss(model, ids).backward()
    everyone = [None] * world
    dist.all_gather_object(everyone, schedule.events)
    assert all(events == everyone[0] for events in everyone), "ranks issued different sequences"
    return schedule.events


def _launches(events):
    """Return a step's launches of the experts."""
    return [what for kind, what in events if kind == "schedule" and "attention" not in what]


def _listed(table):
    """Return the launches of a forward and of its backward."""
    forward, backward = zip(*(line.split("|") for line in table.strip().splitlines()), strict=True)
    return [launch.strip() for launch in forward + backward if launch.strip()]


def _as_listed(folder):
    at_once, chunked = _recorded(folder, 2), _recorded(folder, 2, **OVERLAP)
    assert _launches(at_once) == _listed(_AT_ONCE) and _launches(chunked) == _listed(_CHUNKED)
    for events in (at_once, chunked):
        # Both directions of every chunk have been issued, and waited for, when the experts' gradients are reduced.
        assert events.index(("reduce", "layers.0.experts")) > max(
            i for i, (kind, what) in enumerate(events) if kind == "schedule" and "dispatch" in what
        )


def _gathered_behind_attention(folder, layers):
    events = _recorded(folder, 1)
    turn = events.index(("schedule", f"compute: attention {layers - 1}")) + 1
    forward, backward = events[:turn], events[turn:]
    for i in range(layers):
        at = forward.index(("schedule", f"compute: attention {i}"))
        assert forward.index(("gather", f"layers.{i}.experts")) < at
    for i in range(1, layers):
        at = backward.index(("schedule", f"compute: gradient of attention {i}"))
        assert backward.index(("gather", f"layers.{i - 1}.experts")) < at


def _schedules(one, three):
    _as_listed(one)
    _gathered_behind_attention(three, 3)


def test_schedule_of_layers_is_the_listed_one_and_experts_are_gathered_behind_attention(tmp_path):
    one = save_glm4_moe(tmp_path / "1", num_hidden_layers=1, first_k_dense_replace=0)
    run_ranks(_schedules, 2, one, save_qwen3_moe(tmp_path / "3", num_hidden_layers=3, mlp_only_layers=[]))
