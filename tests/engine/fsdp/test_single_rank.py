"""Units of one rank: they compute with their shards, and what autograd or FSDP has made becomes the gradient."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from epfsdp2.engine.compat import fsdp_groups
from epfsdp2.engine.compat.private_names import MissingNameError
from epfsdp2.engine.fsdp import single_rank
from epfsdp2.engine.fsdp.reshard import reshard_all
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from tests.support.engine.sharded import sharded_model, whole_gradients
from tests.support.models.tiny import reference_model, relative_error, save_qwen3_moe, token_batch, token_loss
from tests.support.ranks import run_ranks

WORLD = 4


def _pointer(tensor):
    return tensor.to_local().untyped_storage().data_ptr()


def _experts(model):
    return {name: p for name, p in model.named_parameters() if ".experts." in name}


def _computed_with(model, ids):
    """Where the data of each expert parameter are while its module computes."""
    found, hooks = {}, []
    for fqn, module in model.named_modules():
        if fqn.endswith(".experts"):

            def record(module, _, fqn=fqn):
                found.update({f"{fqn}.{name}": _pointer(p) for name, p in module.named_parameters()})

            hooks.append(module.register_forward_pre_hook(record))
    loss = token_loss(model, ids)
    for hook in hooks:
        hook.remove()
    return loss, found


def _own_tokens():
    return token_batch(WORLD)[2 * dist.get_rank() : 2 * dist.get_rank() + 2]


def _no_copies(folder):
    model, _ = sharded_model(folder, WORLD, WORLD)
    reduced = []
    reduce = _fsdp_param_group.foreach_reduce

    def recorded(params, *args, **kwargs):
        reduced.extend(param._param_fqn for param in params)
        return reduce(params, *args, **kwargs)

    with mock.patch.object(_fsdp_param_group, "foreach_reduce", recorded):
        for _ in range(2):
            loss, found = _computed_with(model, _own_tokens())
            assert found == {name: _pointer(p) for name, p in _experts(model).items()}
            loss.backward()
    assert reduced and not any(".experts." in name for name in reduced)
    _are_those_of_two_batches(folder, model)


def _are_those_of_two_batches(folder, model):
    reference = reference_model(folder)
    for _ in range(2):
        token_loss(reference, token_batch(WORLD)).backward()
    wanted = dict(reference.named_parameters())
    assert max(relative_error(grad, wanted[n].grad) for n, grad in whole_gradients(model).items()) < 1e-5


def test_single_rank_unit_computes_with_its_shards_and_keeps_its_gradients(tmp_path):
    run_ranks(_no_copies, WORLD, save_qwen3_moe(tmp_path))


def _not_reduced_at_first(folder):
    model, _ = sharded_model(folder, WORLD, WORLD)
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        token_loss(model, _own_tokens()).backward()
    _are_those_of_two_batches(folder, model)


def test_single_rank_unit_whose_first_gradients_are_not_reduced_adds_them_to_the_next(tmp_path):
    run_ranks(_not_reduced_at_first, WORLD, save_qwen3_moe(tmp_path))


def _moved(folder):
    model, _ = sharded_model(folder, WORLD, WORLD)
    before, _ = _computed_with(model, _own_tokens())
    before.backward()
    before = before.detach()  # a graph holds the parameters
    first = [StorageWeakRef(p.to_local().untyped_storage()) for p in _experts(model).values()]
    model.zero_grad()
    model._apply(torch.clone)  # as ``model.to`` does on a GPU
    assert all(storage.expired() for storage in first)
    after, found = _computed_with(model, _own_tokens())
    assert found == {name: _pointer(p) for name, p in _experts(model).items()}
    assert torch.equal(before, after)


def test_single_rank_unit_whose_shards_move_holds_nothing_of_where_they_were(tmp_path):
    run_ranks(_moved, WORLD, save_qwen3_moe(tmp_path))


class _Casts(TorchDispatchMode):
    """Elements of each tensor that was cast or copied to another dtype or device."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.sizes.append(out.numel())
        return out


def _casts(folder):
    model, _ = sharded_model(folder, WORLD, WORLD, param_dtype=torch.bfloat16)
    with _Casts() as cast:
        loss, found = _computed_with(model, _own_tokens())
    loss.backward()
    experts = _experts(model)
    assert not {_pointer(p) for p in experts.values()} & {*found.values()}
    assert not {p.to_local().numel() for p in experts.values()} & {*cast.sizes}
    assert all(p.grad.dtype == torch.float32 for p in experts.values())


def test_single_rank_unit_of_another_dtype_casts_its_shards_into_what_it_computes_with(tmp_path):
    run_ranks(_casts, WORLD, save_qwen3_moe(tmp_path))


@contextlib.contextmanager
def _counted_casts():
    casts, keeping_version = [], single_rank.keeping_version

    def counted(gathered):
        casts.append(gathered.nbytes)
        return keeping_version(gathered)

    with mock.patch.object(single_rank, "keeping_version", counted):
        yield casts


def _kept(model):
    """Bytes of what experts have been cast into, and is not freed."""
    groups = [g for m in model.modules() if isinstance(m, FSDPModule) for g in fsdp_groups.parameter_groups(m)]
    shards = [shard for group in groups for shard in getattr(group, "own_shards", ())]
    return sum(t.untyped_storage().nbytes() for shard in shards for t in shard._param.all_gather_outputs)


def _trained(folder, keeping, fused, steps=3, micro_batches=2):
    """Bits of losses and parameters after steps between which weights are stepped, loaded and moved."""
    model, _ = sharded_model(folder, WORLD, WORLD, param_dtype=torch.bfloat16, checkpointing="full")
    optimizer = build_multi_optimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-2, fused=fused))
    losses, casts_of_steps = [], []
    for step in range(steps):
        with _counted_casts() as casts, keeping(model):
            for _ in range(micro_batches):
                losses.append(token_loss(model, _own_tokens()))
                losses[-1].backward()
            kept = _kept(model)
        assert _kept(model) == 0
        casts_of_steps.append(len(casts))
        if keeping is single_rank.keeping_casts:
            assert kept == sum(casts)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                for param in model.parameters():
                    param.to_local().mul_(0.5)  # as a checkpoint is loaded
            model._apply(torch.clone)  # as parameters are offloaded and come back
    return losses, [p.to_local() for p in model.parameters()], casts_of_steps


def _keeps_casts(folder):
    for fused in (False, True):  # neither counts as a new version of a DTensor
        wanted, weights, each_time = _trained(folder, contextlib.nullcontext, fused)
        losses, kept_weights, once = _trained(folder, single_rank.keeping_casts, fused)
        assert all(map(torch.equal, losses, wanted)) and all(map(torch.equal, kept_weights, weights))
        # Two weights in each of two layers, in forward and in backward of two micro-batches.
        assert once == [4] * 3 and each_time == [16] * 3


def test_single_rank_unit_keeps_what_its_shards_are_cast_into_while_weights_do_not_change(tmp_path):
    run_ranks(_keeps_casts, WORLD, save_qwen3_moe(tmp_path))


def _left_gathered(folder):
    model, _ = sharded_model(folder, WORLD, WORLD, param_dtype=torch.bfloat16, reshard_after_forward=False)
    with torch.no_grad():
        for _ in range(2):  # with parameters that are gathered when the first batch ends
            with single_rank.keeping_casts(model):
                losses = [token_loss(model, _own_tokens()) for _ in range(2)]
            assert losses[0] == losses[1] and _kept(model) > 0
    reshard_all(model)
    assert _kept(model) == 0
    with pytest.raises(InterruptedError), single_rank.keeping_casts(model):
        token_loss(model, _own_tokens())
        raise InterruptedError
    reshard_all(model)
    assert _kept(model) == 0 and torch.equal(token_loss(model, _own_tokens()), losses[0])


def test_single_rank_unit_that_stays_gathered_is_freed_when_fsdp_reshards_it(tmp_path):
    run_ranks(_left_gathered, WORLD, save_qwen3_moe(tmp_path))


class _Passes(TorchDispatchMode):
    """Names of the operators whose results have as many elements as ``size``, views left out."""

    def __init__(self, size):
        super().__init__()
        self.size, self.names = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_view = func in (torch.ops.aten.detach.default, torch.ops.aten.view.default)
        if isinstance(out, torch.Tensor) and out.numel() == self.size and not is_view:
            self.names.append(func.name())
        return out


def _passes(folder):
    model, _ = sharded_model(folder, WORLD, WORLD, param_dtype=torch.bfloat16)
    keep, found = single_rank._keep_gradient, []

    def recorded(param, divide_by):
        with _Passes(param.sharded_param.to_local().numel()) as passes:
            keep(param, divide_by)
        found.append(passes.names)

    with mock.patch.object(single_rank, "_keep_gradient", recorded):
        for _ in range(2):
            token_loss(model, _own_tokens()).backward()
    first, more = found[: len(found) // 2], found[len(found) // 2 :]
    assert first == [["aten::mul.Tensor"]] * len(_experts(model)) and more == [["aten::add_.Tensor"]] * len(first)


def test_single_rank_unit_scales_casts_and_adds_a_gradient_in_one_pass(tmp_path):
    run_ranks(_passes, WORLD, save_qwen3_moe(tmp_path))


def _on_the_host(folder):
    model, _ = sharded_model(folder, WORLD, WORLD, cpu_offload=True)
    for _ in range(2):
        loss, found = _computed_with(model, _own_tokens())
        loss.backward()
    assert not {_pointer(p) for p in _experts(model).values()} & {*found.values()}
    _are_those_of_two_batches(folder, model)


def test_single_rank_unit_on_the_host_computes_with_copies(tmp_path):
    run_ranks(_on_the_host, WORLD, save_qwen3_moe(tmp_path))


def _renamed(folder):
    other_names = mock.patch.object(fsdp_groups, "_PARAM", ("_sharded_param_data", "_data_of_the_shard"))
    missing = pytest.raises(MissingNameError, match="has no FSDPParam._data_of_the_shard, which epfsdp2 needs")
    with other_names, missing:
        sharded_model(folder, 1)


def test_parameter_groups_of_a_torch_with_other_names_raise(tmp_path):
    run_ranks(_renamed, 1, save_qwen3_moe(tmp_path))


def _one_buffer(folder):
    allocate, packed = single_rank._SameBuffer.allocate, []

    def recorded(self, *args, **kwargs):
        packed.append(allocate(self, *args, **kwargs))
        return packed[-1]

    with mock.patch.object(single_rank._SameBuffer, "allocate", recorded):
        model, _ = sharded_model(folder, WORLD, 2, 2)
        for _ in range(2):  # the second adds to what there is
            token_loss(model, _own_tokens()).backward()
    experts = _experts(model)
    layers = len(experts) // 2
    first = [p.untyped_storage().data_ptr() for p in packed[: 2 * layers]]
    assert len(packed) == 2 * 2 * layers and first[::2] == first[1::2]
    assert {_pointer(p.grad) for p in experts.values()} == set(first)


def test_single_rank_reduce_with_replicas_makes_fsdps_packed_buffer_the_gradient(tmp_path):
    run_ranks(_one_buffer, WORLD, save_qwen3_moe(tmp_path))


def test_same_buffer_after_an_error_is_allocated_anew():
    cpu, buffer = torch.device("cpu"), single_rank._SameBuffer()

    def fails():
        packed = buffer.allocate((4,), dtype=torch.float32, device=cpu)
        raise OSError(f"out of memory after {packed.numel()}")

    with pytest.raises(OSError):
        fails()
    packed = buffer.allocate((4,), dtype=torch.float32, device=cpu)
    with pytest.raises(RuntimeError, match="an odd number of times"):
        buffer.check_is_complete()
    assert buffer.allocate((4,), dtype=torch.float32, device=cpu) is packed
    buffer.check_is_complete()


def test_same_buffer_asked_for_pairs_of_two_sizes_raises():
    cpu, buffer = torch.device("cpu"), single_rank._SameBuffer()
    for size, dtype in ((5, torch.float32), (4, torch.bfloat16)):
        packed = buffer.allocate((4,), dtype=torch.float32, device=cpu)
        with pytest.raises(RuntimeError, match=f"packed 4 gradients of torch.float32 and asks for {size} of {dtype}"):
            buffer.allocate((size,), dtype=dtype, device=cpu)
        del packed  # nobody else holds it
