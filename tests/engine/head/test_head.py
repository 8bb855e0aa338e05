"""Log-probs and entropies from hidden states, a tile of the logits at a time, equal the plain model's."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from epfsdp2.engine.head import log_probs
from epfsdp2.engine.head.causal_head import CausalHead, Wanted, why_more_than_the_head, why_whole_logits
from epfsdp2.engine.head.tiles import add_product
from epfsdp2.engine.lora.adapters import Lora
from epfsdp2.engine.lora.settings import LoraSettings
from tests.parity.families import ALL, FAMILIES
from tests.parity.family import HEADS, SCALED
from tests.parity.float64 import float64
from tests.support.models.tiny import reference_model, relative_error, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import PADDED, of_this_rank, ppo_batch, ppo_samples, ppo_worker

# Models that scale logits, one around another that has the head, and one without a head.
WHOLE = {*SCALED, "llama4", "openai_privacy_filter"}
if Version(transformers.__version__) < Version("5.19"):  # its forward can't be followed
    WHOLE.add("qwen3_omni_moe")


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(log_probs, "tile_sizes", lambda device: (5, 16))


def _wanted(logits, labels, temperature):
    scaled = logits / temperature[..., None]
    every = scaled.log_softmax(-1)
    return torch.stack((every.gather(-1, labels[..., None])[..., 0], -(every.exp() * every).sum(-1)), -1)


@pytest.mark.parametrize(
    ("dtype", "bound", "of_gradients"),
    [(torch.float32, 1e-5, 1e-5), (torch.float64, 1e-12, 1e-12), (torch.bfloat16, 1e-5, 2e-2)],
)
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_head_in_parts_has_the_values_and_gradients_of_whole_logits(
    small_tiles, dtype, bound, of_gradients, with_entropy, has_bias
):
    torch.manual_seed(0)
    labels, temperature = torch.randint(0, 50, (23,)), torch.rand(23) + 0.5
    labels[:4] = torch.tensor([0, 15, 16, 49])  # at the edges of tiles
    hidden, weight, grad = torch.randn(23, 12), torch.randn(50, 12) * 3, torch.randn(23, 1 + with_entropy)
    tensors = [t.to(dtype) for t in (hidden, weight, *[torch.randn(50) * 9] * has_bias)]
    leaves = [t.clone().requires_grad_() for t in tensors]
    found = log_probs.log_probs_and_entropy(*leaves[:2], [*leaves, None][2], labels, temperature, with_entropy)
    found.backward(grad.to(found.dtype))
    plain = [t.double().requires_grad_() for t in tensors]
    logits = F.linear(*plain)
    _wanted(logits, labels, temperature.double())[:, : 1 + with_entropy].backward(grad.double())
    if dtype == torch.bfloat16:
        logits = hidden.to(dtype) @ weight.to(dtype).t()  # as the head rounds them
        logits = (logits + tensors[2] if has_bias else logits).double()
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert relative_error(found, _wanted(logits, labels, temperature.double())[:, : 1 + with_entropy]) < bound
    for ours, theirs in zip(leaves, plain, strict=True):
        assert ours.grad.dtype == dtype and relative_error(ours.grad, theirs.grad) < of_gradients


def test_head_on_a_gpu_adds_products_in_bfloat16_to_a_sum_in_float32_in_one_operator():
    class OnGpu(torch.Tensor):
        is_cuda = True

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    names = []
    a, b = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((4, 3), (3, 5)))
    total = torch.empty(4, 5, device="meta").as_subclass(OnGpu)
    with Operators():
        add_product(total, a, b)
    assert names == ["aten::addmm.dtype_out"]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(name, {}) for name in ALL] + [(name, {key: value}) for name, key, value in HEADS],
    ids=[*ALL] + [f"{name} {key}" for name, key, _ in HEADS],
)
def test_head_in_parts_of_every_family_is_exact_or_keeps_whole_logits(small_tiles, name, sizes):
    family = replace(ALL[name], sizes=ALL[name].sizes | sizes)
    why = why_whole_logits(family.build().to("meta"))
    assert bool(why) == (name in WHOLE or "final_logit_softcapping" in sizes), why
    if why:
        return
    with float64():  # some families magnify float32's rounding
        _compare(family.build_random("eager").eval())


def _compare(plain):
    model = copy.deepcopy(plain)
    head = CausalHead(model)
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    labels, temperature = ids.roll(-1, dims=-1), torch.tensor([[0.7], [1.3]]).expand(2, 7)
    grad = torch.randn(2, 7, 2, generator=torch.Generator().manual_seed(2))
    logits = plain(input_ids=ids, use_cache=False).logits
    wanted = _wanted(logits, labels, temperature)
    (wanted * grad).sum().backward()
    head.wanted = Wanted(labels, temperature, with_entropy=True)
    found = torch.stack(head.take(model(input_ids=ids, use_cache=False).logits), -1)
    (found * grad).sum().backward()
    assert relative_error(found.detach(), wanted.detach()) < 1e-10
    gradients = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}
    assert gradients.keys() == {key for key, p in model.named_parameters() if p.grad is not None}
    for key, theirs in gradients.items():
        assert relative_error(model.get_parameter(key).grad, theirs) < 1e-10, key
    assert model(input_ids=ids, use_cache=False).logits.shape == logits.shape


def test_head_in_parts_leaves_out_the_rows_of_a_padded_vocabulary(small_tiles):
    class Padded(transformers.Qwen3MoeForCausalLM):
        """As Inkling of transformers 5.24, whose forward leaves out the last logits."""

        def forward(self, **kwargs):
            output = super().forward(**kwargs)
            output.logits = output.logits[..., :70] if output.logits.shape[-1] > 70 else output.logits
            return output

    model = FAMILIES["qwen3_moe"].build_random("eager")
    model.__class__ = Padded
    assert not why_whole_logits(copy.deepcopy(model).to("meta"))
    assert "leaves out" in why_more_than_the_head(copy.deepcopy(model).to("meta"))
    with float64():
        _compare(model.double().eval())


def test_head_in_parts_with_adapters_or_an_unknown_forward_keeps_whole_logits():
    model = FAMILIES["qwen3_moe"].build().to("meta")
    model.lm_head.register_parameter("weight_lora_A", nn.Parameter(torch.empty(4, 48, device="meta")))
    assert why_whole_logits(model) == "its head has parameters besides weight and bias"
    model = FAMILIES["qwen3_moe"].build().to("meta")
    Lora(model, LoraSettings("model", 4, 8, "all-linear"))
    assert not why_whole_logits(model)
    model.model.forward = before = lambda *_, **__: None
    assert not why_whole_logits(model) and model.model.forward is before
    model.lm_head = nn.Sequential(model.lm_head)
    assert why_whole_logits(model) == "its head is a Sequential"


def test_head_in_parts_whose_output_was_changed_has_no_log_probs():
    model = FAMILIES["qwen3_moe"].build()
    model.set_experts_implementation("eager")
    head, ids = CausalHead(model), torch.arange(3, 9)[None]
    head.wanted = Wanted(ids, torch.ones(1, 6), with_entropy=False)
    with pytest.raises(RuntimeError, match=r"changed what its head returned.*engine.chunked_logits=False"):
        head.take(model(input_ids=ids).logits * 1.0)
    head.wanted = Wanted(ids, torch.ones(1, 6), with_entropy=False)
    with pytest.raises(RuntimeError, match=r"for 6 labels.*engine.chunked_logits=False"):
        model(input_ids=ids, logits_to_keep=2)


def _logits_are_whole_where_they_are_read(folder):
    from verl.utils import tensordict_utils as tu

    log_probs.tile_sizes = lambda device: (5, 16)
    reference, samples = reference_model(folder), ppo_samples()
    for model in ({}, PADDED):
        worker = ppo_worker(folder, 2, model=model)
        head, mine, asked = worker.engine._head, of_this_rank(worker, samples), []
        worker.engine.module.lm_head.register_forward_pre_hook(lambda *_, h=head, a=asked: a.append(h.wanted))
        temperatures = 0.5 + torch.arange(len(mine)) / 10
        for squares, temperature in ((False, 0.7), (True, 0.7), (False, temperatures)):
            batch = ppo_batch(mine)
            tu.assign_non_tensor(batch, compute_loss=False, calculate_sum_pi_squared=squares, calculate_entropy=squares)
            if isinstance(temperature, torch.Tensor):
                batch["temperature"] = temperature
            else:
                tu.assign_non_tensor(batch, temperature=temperature)
            asked.clear()
            output = worker.infer_batch(batch)
            assert {wanted is None for wanted in asked} == {squares}
            assert all(wanted is None or not wanted.with_entropy for wanted in asked)
            assert [name in output for name in ("entropy", "sum_pi_squared")] == [squares, squares]
            for i, (ids, *_) in enumerate(mine):
                own = temperature[i] if isinstance(temperature, torch.Tensor) else temperature
                with torch.no_grad():
                    every = (reference(input_ids=ids[None]).logits[0] / own).log_softmax(-1)
                wanted = every[:-1].gather(-1, ids[1:, None])[:, 0]
                found = tu.get(output, "log_probs").unbind()[i][:-1]
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
                if squares:
                    sums = tu.get(output, "sum_pi_squared").unbind()[i]
                    torch.testing.assert_close(sums, every.exp().square().sum(-1), rtol=1e-5, atol=1e-5)
    assert ppo_worker(folder, 2, chunked_logits=False).engine._head is None
    shared = ppo_worker(folder, 2, ulysses_sequence_parallel_size=2)
    assert shared.engine._head is not None
    dist.barrier()


def test_head_in_parts_where_verl_reads_logits_keeps_them_whole(tmp_path):
    run_ranks(_logits_are_whole_where_they_are_read, 2, save_qwen3_moe(tmp_path))
