"""Measure a GPU: matrix products, memory, attention; an experts' layer alone, exchanged, beside an all-gather."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.utils import is_flash_attn_3_available

from ...engine.compat.torch_sms import leave_sms
from ...engine.errors import SettingError
from ...engine.moe import deepep, overlap
from ...engine.moe.forward import ExpertsRuntime, TokenExchange, attach, experts_forward
from ...engine.moe.gemm.backends import backend_named, choose_backend
from .check import NEEDS_A_GPU, Ranks, Row, rate_row
from .links import card_of

__all__ = ["judge_experts", "judge_rates", "measure_experts", "measure_rates"]

# recipes.plan multiplies published rates by shares that were fitted on an H100. That GPU reached 798 of 989 TFLOP/s in
# a large product and 2,970 of 3,350 GB/s in a copy (benchmarks/results/gpu.md).
_TFLOPS_PUBLISHED, _HBM_PUBLISHED = 989 / 798, 3350 / 2970
_MATRIX_SHARE, _MEMORY_SHARE, _EXPERTS_SHARE = 0.65, 0.75, 0.4  # of the published rates
_GAIN = 0.97  # a setting is proposed if the time with it is below this share of the time without
_CHUNKS, _SMS = (2, 4), (8, 16, 24)
_DEFAULT_SMS = 16  # engine.communication_sms on a GPU
_ATTENTION_ERROR = 1e-2  # relative, in bfloat16


def measure_rates(ranks: Ranks) -> dict[str, float]:
    """Return TFLOP/s of a large product, GB/s of a copy, and seconds of attention; {} without a GPU."""
    if not ranks.has_gpus:
        return {}
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rates = {"tflops": 2 * size**3 / ranks.seconds_of(lambda: a @ b) / 1e12}
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rates["memory"] = 2 * source.nbytes / ranks.seconds_of(lambda: target.copy_(source)) / 1e9
    return rates | (_flash_attention_3(ranks) if is_flash_attn_3_available() else {})


def _flash_attention_3(ranks: Ranks) -> dict[str, float]:
    """Return seconds of causal attention over 4,096 tokens, by SDPA and FlashAttention 3, and their relative error."""
    from flash_attn_interface import flash_attn_func

    q, k, v = (torch.randn(1, 4096, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def sdpa() -> torch.Tensor:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        return nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True).transpose(1, 2)

    def flash() -> torch.Tensor:
        out = flash_attn_func(q, k, v, causal=True)
        return out[0] if isinstance(out, tuple) else out  # older releases also return the log-sum-exp

    error = ((flash() - sdpa()).norm() / sdpa().norm()).item()
    return {"sdpa": ranks.seconds_of(sdpa), "flash": ranks.seconds_of(flash), "flash error": error}


def judge_rates(found: list[dict[str, float]], ranks: Ranks) -> Iterator[Row]:
    if not ranks.has_gpus:
        yield Row("matrix products, memory, attention", NEEDS_A_GPU)
        return
    card = card_of(ranks.device)
    tflops, memory = ([each[name] for each in found] for name in ("tflops", "memory"))
    row = rate_row("matrix products", tflops, "TFLOP/s", _MATRIX_SHARE * card.tflops if card else None)
    yield replace(row, cluster={"tflops": round(min(tflops) * _TFLOPS_PUBLISHED)})
    row = rate_row("memory of a GPU, copied", memory, "GB/s", _MEMORY_SHARE * card.memory if card else None)
    yield replace(row, cluster={"hbm": round(min(memory) * _HBM_PUBLISHED)})
    if "flash" not in found[0]:
        yield Row("FlashAttention 3", "not installed")
        return
    error, faster = max(each["flash error"] for each in found), min(each["sdpa"] / each["flash"] for each in found)
    value = f"{faster:.2f} x as fast as SDPA, {error:.0e} from it; packed rows use it"
    yield Row("FlashAttention 3", value, f"< {_ATTENTION_ERROR:.0e}", "right" if error < _ATTENTION_ERROR else "wrong")


class _Layer:
    """Experts and tokens of this rank; on a GPU with the sizes of a layer of Qwen3-30B-A3B at 16 experts a rank."""

    def __init__(self, ranks: Ranks):
        self.tokens, hidden, inner, here, top_k = (8192, 2048, 768, 16, 8) if ranks.has_gpus else (64, 64, 32, 4, 2)
        self.dtype = torch.bfloat16 if ranks.has_gpus else torch.float32
        self.here, self.all, self.hidden = here, here * ranks.per_node, hidden
        self.flops = 3 * 2 * self.tokens * top_k * 3 * hidden * inner
        self.backend = choose_backend("auto", ranks.device, self.dtype).name
        config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, num_experts=here)
        generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
        with torch.device(ranks.device):
            self.module = Qwen3MoeExperts(config).to(self.dtype)
            for param in self.module.parameters():
                nn.init.normal_(param, std=0.02, generator=generator)
            self.x = torch.randn(self.tokens, hidden, generator=generator).to(self.dtype).requires_grad_()
            scores = torch.rand(self.tokens, self.all, generator=generator)
            self.weights, self.experts = scores.softmax(1).topk(top_k)
        self.leaves = [self.x, self.weights.requires_grad_(), *self.module.parameters()]

    def step(self, group: dist.ProcessGroup | None, exchange: TokenExchange | None = None) -> Callable[[], None]:
        """Return a function of a forward and backward; without a group every token stays on its rank."""
        experts = self.experts if group is not None else self.experts % self.here
        runtime = ExpertsRuntime(self.all if group is not None else self.here, group, self.backend, exchange)

        def run() -> None:
            attach(self.module, runtime)
            for leaf in self.leaves:
                leaf.grad = None
            out = experts_forward(self.module, self.x, experts, self.weights)
            out.backward(self.x.detach())

        return run

    def exchanged(self, exchange: Callable[..., torch.Tensor], group: dist.ProcessGroup, **more: Any) -> Callable:
        """Return a step with ``exchange`` in place of the synchronous all-to-all."""
        sums = backend_named(self.backend)
        return self.step(group, functools.partial(exchange, num_experts=self.all, group=group, backend=sums, **more))


def measure_experts(ranks: Ranks) -> dict[str, Any]:
    """Measure a forward and backward with each token exchange, and beside an all-gather of weights.

    Returns ``seconds`` by exchange; on GPUs also ``beside``, seconds by the number of SMs that the GEMMs leave;
    ``flops`` of a step; the reason if DeepEP was not measured.
    """
    layer = _Layer(ranks)
    steps = {"alone": layer.step(None)}
    without = ""
    if ranks.per_node > 1:
        steps["exchanged"] = layer.step(ranks.inside)
        steps |= {f"{n} chunks": layer.exchanged(overlap.exchange, ranks.inside, chunks=n) for n in _CHUNKS}
        try:
            deepep.check_deepep(ranks.device, ranks.per_node, layer.hidden, layer.dtype)
            steps["deepep"] = layer.exchanged(deepep.exchange, ranks.inside)
        except SettingError as error:
            without = error.rule
    seconds = {}
    for name, step in steps.items():
        ranks.note(f"experts, {name}")
        seconds[name] = ranks.seconds_of(step)
    beside = _beside_gather(ranks, layer.step(None)) if ranks.has_gpus and ranks.world > 1 else {}
    return {"seconds": seconds, "beside": beside, "flops": layer.flops, "deepep": without}


def _beside_gather(ranks: Ranks, step: Callable[[], None]) -> dict[str, float]:
    """Return seconds of a step during an all-gather of 256 MiB over all ranks, by the SMs that the GEMMs leave."""
    whole = torch.zeros((1 << 28) // ranks.world * ranks.world, dtype=torch.uint8, device="cuda")
    part = whole[: len(whole) // ranks.world].clone()

    def both() -> None:
        work = dist.all_gather_into_tensor(whole, part, async_op=True)
        step()
        work.wait()

    seconds = {}
    for sms in (0, *_SMS):
        ranks.note(f"experts beside an all-gather, {sms} SMs left")
        leave_sms(sms)  # 0 changes nothing, so it has to be first
        seconds[str(sms)] = ranks.seconds_of(both)
    return seconds


def judge_experts(found: list[dict[str, Any]], ranks: Ranks) -> Iterator[Row]:
    slowest = {name: max(each["seconds"][name] for each in found) for name in found[0]["seconds"]}
    rates, card = [each["flops"] / each["seconds"]["alone"] / 1e12 for each in found], card_of(ranks.device)
    wanted = _EXPERTS_SHARE * card.tflops if card and ranks.has_gpus else None
    yield rate_row("experts, forward and backward", rates, "TFLOP/s", wanted)
    if "exchanged" in slowest:
        shown = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in slowest.items())
        best = min(slowest, key=lambda name: slowest[name] if name != "alone" else float("inf"))
        name = "engine.dispatcher=deepep" if best == "deepep" else f"engine.dispatch_chunks={best.split()[0]}"
        settings = _proposed(name, slowest[best] / slowest["exchanged"]) if ranks.has_gpus else []
        yield Row(f"experts over ep {ranks.per_node}", shown, settings=settings)
        if found[0]["deepep"]:
            yield Row("DeepEP", found[0]["deepep"])
    if not ranks.has_gpus:
        yield Row("SMs that collectives take", NEEDS_A_GPU)
    elif found[0]["beside"]:
        beside = {int(sms): max(each["beside"][sms] for each in found) for sms in found[0]["beside"]}
        shown = "SMs left " + ", ".join(f"{sms}: {1e3 * seconds:.3g} ms" for sms, seconds in beside.items())
        best_sms = min(beside, key=beside.__getitem__)
        settings = _proposed(f"engine.communication_sms={best_sms}", beside[best_sms] / beside[_DEFAULT_SMS])
        yield Row("experts beside an all-gather", shown, settings=settings)


def _proposed(setting: str, share: float) -> list[str]:
    """Return a setting whose time is this share of the time without it, if that is a gain."""
    return [f"{setting} ({share:.0%} of the time without)"] if share < _GAIN else []
