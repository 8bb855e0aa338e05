"""Muon on sharded parameters against torch's Muon in one process, on matrices that were split by hand."""

import contextlib
import functools
import math
import zlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import _muon as torch_muon
from transformers import AutoModelForCausalLM

from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.lora.adapters import Lora
from epfsdp2.engine.lora.settings import LoraSettings
from epfsdp2.engine.model.meta import build_on_meta, materialize
from epfsdp2.engine.optim import muon as muon_module
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.optim.muon import Muon, newton_schulz
from epfsdp2.engine.optim.muon_partition import matrix_groups, matrix_shard_step, muon_parameters
from epfsdp2.engine.parallelize import parallelize
from epfsdp2.engine.topology.dtensor import local_ranges, local_tensor
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from tests.support.engine.muon import CONFIGS, muon_model, stepped_by_torch
from tests.support.engine.sharded import sharded_model, whole_parameters, whole_tensors
from tests.support.models.tiny import VOCAB, reference_model, relative_error, save_qwen3, save_qwen3_moe, token_loss
from tests.support.ranks import each_case, run_ranks

WORLD = 4
RELATIVE = 1e-5
MESHES = [(1, -1), (2, -1), (4, -1), (1, 2), (2, 2), (1, 1)]
FEW = [(1, -1), (2, 2)]
DECAYED = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
PLAIN = {"lr": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "original", "nesterov": False, "momentum": 0.9, "ns_steps": 3}
LORA = LoraSettings("model", 4, 8, "all-linear", modules_to_save=("norm", "lm_head"))


# A process group holds sockets and threads, and there are many models in a process.
_shared_meshes = functools.cache(build_meshes)


def _reference(config, lora=None):
    torch.manual_seed(0)
    model = muon_model(config)
    if lora is not None:
        Lora(model, lora).freeze_base(model)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.02)
    return model


def _sharded(config, reference, ep, fsdp_size, lora=None, **options):
    meshes = _shared_meshes("cpu", Topology.arrange(WORLD, ep, fsdp_size))
    config._attn_implementation = "eager"
    model = build_on_meta(AutoModelForCausalLM, config, torch.float32)
    if lora is not None:
        Lora(model, lora)
    parallelize(model, meshes, ShardingOptions(param_dtype=torch.float32, **options))
    materialize(model, "cpu")
    wanted = dict(reference.named_parameters())
    with torch.no_grad():
        for name, param in model.named_parameters():
            local_tensor(param).copy_(_mine(param, wanted[name]))
            param.requires_grad_(wanted[name].requires_grad)
    return model


def _mine(param, full):
    return full[local_ranges(param)[0].slices]


def _gradient(name, shape, step):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
    # Rows of different norms, so orthogonalising a matrix in pieces gives another result.
    return torch.randn(shape, generator=generator) * torch.linspace(0.1, 2, shape[-2]).unsqueeze(-1)


def _equals_torch(family, cases, options, lora=None):
    config = CONFIGS[family]()
    reference = _reference(config, lora)
    key = "gpt_oss." if family.startswith("gpt-oss") else ""
    names = list(muon_parameters(reference))
    assert names and (lora is None or all(name.endswith(("_lora_A", "_lora_B")) for name in names))
    weights = {key + n: p.detach() for n, p in reference.named_parameters() if n in names}
    gradients = [{n: _gradient(n, w.shape, step) for n, w in weights.items()} for step in range(2)]
    expected = stepped_by_torch(weights, gradients, **options)
    for ep, fsdp_size, sharding in cases:
        model = _sharded(config, reference, ep, fsdp_size, lora, **sharding)
        assert list(muon_parameters(model)) == names
        optimizer = Muon(matrix_groups(model), **options, bucket_bytes=4096)
        params = {key + n: p for n, p in model.named_parameters() if n in names}
        for grads, wanted in zip(gradients, expected, strict=True):
            for name, param in params.items():
                param.grad = torch.zeros_like(param)
                local_tensor(param.grad).copy_(_mine(param, grads[name]))
            optimizer.step()
            for name, got in whole_tensors(params).items():
                where = (family, ep, fsdp_size, sharding, name)
                moved, should = got - weights[name], wanted[name] - weights[name]
                assert relative_error(moved, should) < RELATIVE, (where, relative_error(moved, should))


def _each_equals_torch(cases):
    each_case(cases, _equals_torch)


@pytest.mark.parametrize("meshes", [FEW, pytest.param(MESHES, marks=pytest.mark.long)], ids=["few", "all"])
def test_muon_on_every_mesh_and_layout_steps_like_torch_muon_on_split_matrices(meshes):
    """By default the 8 experts of two families are whole on each rank, so they are cut, too; and adapters."""
    cases = []
    for family in CONFIGS:
        dims = ("auto", 1) if family in ("qwen3", "nemotron-h") else ("auto",)
        of_family = [(*m, {"expert_shard_dim": dim}) for dim in dims for m in meshes]
        cases.append((family, [case for case in of_family if family != "qwen3-uneven" or case[0] < 4], DECAYED))
    for family in ("qwen3", "gpt-oss"):
        cases.append((family, [(2, -1, {})], PLAIN))
        cases.append((family, [(2, -1, {"expert_shard_dim": 0}), (2, 2, {"cpu_offload": True})], DECAYED, LORA))
    run_ranks(_each_equals_torch, WORLD, cases, timeout=600)


def _trains_like_the_reference(folder, cases):
    ids, rank = torch.randint(0, VOCAB, (8, 17), generator=torch.Generator().manual_seed(1)), dist.get_rank()
    reference = reference_model(folder).train()
    optimizer = _muon_and_adamw(reference)
    for _ in range(2):
        optimizer.zero_grad()
        token_loss(reference, ids).backward()
        optimizer.step()
    wanted = dict(reference.named_parameters())
    momentum = {name: state.get("momentum_buffer") for name, state in optimizer.state_dict()["state"].items()}
    for ep, fsdp_size, options in cases:
        model, _ = sharded_model(folder, WORLD, ep, fsdp_size, **options)
        optimizer = _muon_and_adamw(model.train())
        for _ in range(2):
            optimizer.zero_grad()
            token_loss(model, ids[2 * rank : 2 * rank + 2]).backward()
            optimizer.step()
        for name, param in whole_parameters(model).items():
            assert relative_error(param, wanted[name].detach()) < RELATIVE, (ep, fsdp_size, options, name)
        for name, state in optimizer.state_dict()["state"].items():
            assert ("momentum_buffer" in state) == (momentum[name] is not None), name
            if momentum[name] is not None:
                assert relative_error(state["momentum_buffer"].full_tensor(), momentum[name]) < RELATIVE, (ep, name)


def _muon_and_adamw(model):
    return build_multi_optimizer(
        model,
        lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-6, weight_decay=0.1),
        lambda groups: Muon(groups, lr=1e-3, weight_decay=0.1),
    )


def _each_trains(runs):
    each_case(runs, _trains_like_the_reference)


def test_muon_two_steps_of_training_equal_the_reference(tmp_path):
    cases = [(1, -1, {}), (2, 2, {}), (2, -1, {"expert_shard_dim": 1}), (2, -1, {"cpu_offload": True})]
    cases += [(2, -1, {"etp": 2}), (1, -1, {"etp": 2, "expert_shard_dim": 0})]
    dense = (save_qwen3(tmp_path / "dense"), [(1, 2, {"checkpointing": "full"})])
    run_ranks(_each_trains, WORLD, [(save_qwen3_moe(tmp_path / "moe"), cases), dense])


@contextlib.contextmanager
def _exchanges():
    """Yield a list with each all-to-all: ranks of its group, dtypes, elements sent to others, elements received."""
    seen, call = [], dist.all_to_all_single

    def spy(output, given, output_splits, input_splits, group=None, async_op=False):
        sent = sum(input_splits) - input_splits[dist.get_rank(group)]
        seen.append((dist.get_process_group_ranks(group), {output.dtype, given.dtype}, sent, sum(output_splits)))
        return call(output, given, output_splits, input_splits, group=group, async_op=async_op)

    with mock.patch.object(muon_module.dist, "all_to_all_single", spy):
        yield seen


def _sends_little(cases, bucket_bytes):
    config = CONFIGS["qwen3"]()
    config.num_hidden_layers, config.intermediate_size, config.mlp_only_layers = 8, 24, [1, 3, 5, 7]
    reference = _reference(config)
    for ep, fsdp_size, sharding in cases:
        where = (ep, fsdp_size, sharding)
        model = _sharded(config, reference, ep, fsdp_size, **sharding)
        groups = matrix_groups(model)
        expected = 0.0
        for param in (p for group in groups for p in group["params"]):
            param.grad = torch.ones_like(param)
            ranks = matrix_shard_step(param).parts if matrix_shard_step(param) else 1
            expected += 2 * (1 - 1 / ranks) * local_tensor(param).numel()
            assert math.prod(param.shape[-2:]) * param.itemsize < bucket_bytes
        with _exchanges() as seen:
            Muon(groups, bucket_bytes=bucket_bytes).step()
        sent = [torch.zeros(2) for _ in range(WORLD)]
        dist.all_gather(sent, torch.tensor([float(sum(elements for _, _, elements, _ in seen)), expected]))
        total, wanted = torch.stack(sent).sum(dim=0).tolist()
        # Uneven shards make the difference: owners hold more or less of their own matrices.
        assert abs(total - wanted) <= 0.05 * wanted, (where, total, wanted)
        assert max(float(s[0]) for s in sent) <= 1.2 * total / WORLD, (where, sent)
        assert max((received for *_, received in seen), default=0) * 4 <= 2 * bucket_bytes, where


def _steps_equally(bucket_bytes):
    """Deterministic, and in one order whatever the gradients."""
    config = CONFIGS["qwen3"]()
    reference, orders, after = _reference(config), [], []
    # The second run has the same gradients, the third zero gradients on some ranks.
    for times in (1, 1, int(dist.get_rank() > 1)):
        model = _sharded(config, reference, 2, -1, expert_shard_dim=1)
        for name, param in model.named_parameters():
            if param.dim() > 1:
                param.grad = torch.zeros_like(param)
                local_tensor(param.grad).copy_(_mine(param, _gradient(name, param.shape, 0)) * times)
        with _exchanges() as seen:
            Muon(matrix_groups(model), bucket_bytes=bucket_bytes).step()
        orders.append([ranks for ranks, *_ in seen])
        after.append([local_tensor(param).clone() for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(after[0], after[1], strict=True))
    assert orders[0] == orders[1] == orders[2] and len(orders[0]) > 4
    sizes = [None] * WORLD
    dist.all_gather_object(sizes, [len(group) for group in orders[0]])
    assert all(size == sizes[0] for size in sizes)


def _bfloat16_is_sent():
    """Half as many bytes, and the step of one process."""
    config = CONFIGS["qwen3"]()
    reference = _reference(config)
    model = _sharded(config, reference, 2, -1)
    plain = {name: param for name, param in reference.named_parameters() if param.dim() > 1}
    for name, param in model.named_parameters():
        if param.dim() > 1:
            plain[name].grad = _gradient(name, param.shape, 0)
            param.grad = torch.zeros_like(param)
            local_tensor(param.grad).copy_(_mine(param, plain[name].grad))
    with _exchanges() as seen:
        Muon(matrix_groups(model), weight_decay=0.0, ns_dtype="bf16").step()
    assert seen and all(dtypes == {torch.bfloat16} for _, dtypes, *_ in seen)
    before = {name: param.detach().clone() for name, param in plain.items()}
    Muon(matrix_groups(reference), weight_decay=0.0, ns_dtype="bf16").step()
    after = whole_parameters(model)
    for name in muon_parameters(reference):
        moved, should = after[name] - before[name], plain[name] - before[name]
        # The roundings are the same, except for the order of sums in a batch of another size.
        assert relative_error(moved, should.detach()) < 2**-8, name


def _each_sends(checks):
    each_case(checks, lambda check, *args: check(*args))


def test_muon_step_sends_each_slice_once_there_and_back_in_bounded_buckets_in_one_order():
    cases = [(1, -1, {}), (2, -1, {"expert_shard_dim": 0}), (2, 2, {}), (1, 1, {})]
    run_ranks(_each_sends, WORLD, [(_sends_little, cases, 8192), (_steps_equally, 4096), (_bfloat16_is_sent,)])


def test_newton_schulz_in_bfloat16_equals_torch():
    torch.manual_seed(0)
    coefficients = (3.4445, -4.7750, 2.0315)
    for shape in [(12, 20), (20, 12), (16, 16)]:
        stack = torch.randn(3, *shape)
        got = newton_schulz(stack, coefficients, 5, 1e-7, torch.bfloat16)
        assert got.dtype == torch.bfloat16
        for matrix, mine in zip(stack, got, strict=True):
            wanted = torch_muon._zeropower_via_newtonschulz(matrix, coefficients, 5, 1e-7)
            # One unit in the last place of bfloat16 per iteration, at values of up to 1.
            assert (mine - wanted).abs().max() < 5 * 2**-8
    singular = torch.linalg.svdvals(newton_schulz(torch.randn(2, 9, 30), coefficients, 5, 1e-7, torch.float32))
    assert singular.min() > 0.6 and singular.max() < 1.3
    assert not newton_schulz(torch.zeros(1, 3, 4), coefficients, 5, 1e-7, torch.float32).any()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1.0}, "lr has to be at least 0"),
        ({"momentum": 1.0}, r"momentum has to be in \[0, 1\)"),
        ({"ns_steps": 0}, "ns_steps"),
        ({"ns_coefficients": (1.0, 2.0)}, "three numbers"),
        ({"adjust_lr_fn": "spectral"}, "'spectral'"),
        ({"ns_dtype": "fp16"}, "'fp16'"),
        ({"parts": 2}, "split into 2 parts"),
    ],
)
def test_muon_refuses_options_out_of_range(options, said):
    own = {"params": [nn.Parameter(torch.ones(3, 4))], "parts": options.pop("parts", 1)}
    with pytest.raises(ValueError, match=said):
        Muon([own], **options)
    with pytest.raises(ValueError, match="matrices and stacks"):
        Muon([nn.Parameter(torch.ones(3))])
