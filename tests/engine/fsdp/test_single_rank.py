"""Units of one rank: on a CPU they compute with their shards, and autograd's gradient becomes the shard's."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.multiprocessing.reductions import StorageWeakRef

from epfsdp2.engine import parallelize
from epfsdp2.engine.compat import fsdp_groups
from epfsdp2.engine.compat.private_names import MissingNameError
from epfsdp2.engine.fsdp import single_rank
from epfsdp2.engine.fsdp.after_gather import reshard_all
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from tests.support.engine.sharded import sharded_model, whole_gradients
from tests.support.models.tiny import reference_model, relative_error, save_qwen3_moe, token_batch, token_loss
from tests.support.ranks import each_case, run_ranks

WORLD = 2


def _pointer(tensor):
    return tensor.to_local().untyped_storage().data_ptr()


def _experts(model):
    return {name: p for name, p in model.named_parameters() if ".experts." in name}


def _computed_with(model, ids):
    """Return the loss, and the address of each expert parameter while its module computes."""
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


def _check_gradients_of_two_batches(folder, model):
    reference = reference_model(folder)
    for _ in range(2):
        token_loss(reference, token_batch(WORLD)).backward()
    wanted = dict(reference.named_parameters())
    assert max(relative_error(grad, wanted[n].grad) for n, grad in whole_gradients(model).items()) < 1e-5


def _computes_with_its_shards_and_keeps_its_gradients(folder):
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
    _check_gradients_of_two_batches(folder, model)
    model.zero_grad()
    for is_last in (False, True):  # the first batch's are not reduced
        model.set_requires_gradient_sync(is_last)
        token_loss(model, _own_tokens()).backward()
    _check_gradients_of_two_batches(folder, model)


def _as_on_a_gpu(function):
    """Patch a function of ``parallelize`` to get meshes of a GPU."""

    def called(model, unit, meshes, options):
        shards = {"dense_shard": meshes.dense_shard, "experts_shard": meshes.experts_shard}
        gpu = SimpleNamespace(device_type="cuda")
        on_gpu = SimpleNamespace(topology=meshes.topology, dense=gpu, reduces_by_nccl=False, **shards)
        return real(model, unit, on_gpu, options)

    real = getattr(parallelize, function)
    return mock.patch.object(parallelize, function, called)


def _on_a_gpu_has_fsdps_copies_unless_casts_are_kept(folder):
    for options, own in (({}, False), ({"keep_casts": True}, True)):
        with _as_on_a_gpu("wrap"), _as_on_a_gpu("divide_gradient"):
            model, _ = sharded_model(folder, WORLD, WORLD, **options)
        with mock.patch.object(single_rank, "_keep_gradient", side_effect=AssertionError):
            for _ in range(2):
                loss, found = _computed_with(model, _own_tokens())
                assert (found == {name: _pointer(p) for name, p in _experts(model).items()}) == own
                loss.backward()
        _check_gradients_of_two_batches(folder, model)


def _whose_shards_move_holds_no_old_memory(folder):
    model, _ = sharded_model(folder, WORLD, WORLD)
    before, _ = _computed_with(model, _own_tokens())
    before.backward()
    before = before.detach()  # a graph holds the parameters
    first = [StorageWeakRef(p.to_local().untyped_storage()) for p in _experts(model).values()]
    model.zero_grad()
    model._apply(torch.clone)  # as ``model.to`` on a GPU
    assert all(storage.expired() for storage in first)
    after, found = _computed_with(model, _own_tokens())
    assert found == {name: _pointer(p) for name, p in _experts(model).items()}
    assert torch.equal(before, after)


@contextlib.contextmanager
def _counted_casts():
    casts, keeping_version = [], single_rank.keeping_version

    def counted(gathered):
        casts.append(gathered.nbytes)
        return keeping_version(gathered)

    with mock.patch.object(single_rank, "keeping_version", counted):
        yield casts


def _kept(model):
    """Bytes of the experts' casts that are not freed."""
    groups = [g for m in model.modules() if isinstance(m, FSDPModule) for g in fsdp_groups.parameter_groups(m)]
    shards = [shard for group in groups for shard in getattr(group, "own_shards", ())]
    return sum(t.untyped_storage().nbytes() for shard in shards for t in shard._param.all_gather_outputs)


def _trained(folder, keeping, fused):
    """Losses and parameters after steps between which weights are stepped, loaded and moved."""
    model, _ = sharded_model(folder, WORLD, WORLD, param_dtype=torch.bfloat16, checkpointing="full")
    optimizer = build_multi_optimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-2, fused=fused))
    losses, casts_of_steps = [], []
    for step in range(3):
        with _counted_casts() as casts, keeping(model):
            for _ in range(2):
                losses.append(token_loss(model, _own_tokens()))
                losses[-1].backward()
            kept = _kept(model)
        assert _kept(model) == 0 and all(p.grad.dtype == torch.float32 for p in model.parameters())
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


def _keeps_casts_while_weights_do_not_change(folder):
    for fused in (False, True):  # neither counts as a new version of a DTensor
        wanted, weights, each_time = _trained(folder, contextlib.nullcontext, fused)
        losses, kept_weights, once = _trained(folder, single_rank.keeping_casts, fused)
        assert all(map(torch.equal, losses, wanted)) and all(map(torch.equal, kept_weights, weights))
        # Two weights in each of two layers, in forward and in backward of two micro-batches.
        assert once == [4] * 3 and each_time == [16] * 3


def _left_gathered_is_freed_when_fsdp_reshards_it(folder):
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


def _on_the_host_computes_with_copies(folder):
    model, _ = sharded_model(folder, WORLD, WORLD, cpu_offload=True)
    for _ in range(2):
        loss, found = _computed_with(model, _own_tokens())
        loss.backward()
    assert not {_pointer(p) for p in _experts(model).values()} & {*found.values()}
    _check_gradients_of_two_batches(folder, model)


def _with_replicas_has_fsdps_packed_buffer_as_gradient(folder):
    allocate, packed = single_rank._SameBuffer.allocate, []

    def recorded(self, *args, **kwargs):
        packed.append(allocate(self, *args, **kwargs))
        return packed[-1]

    with mock.patch.object(single_rank._SameBuffer, "allocate", recorded):
        model, _ = sharded_model(folder, WORLD, 1, 1)
        for _ in range(2):  # the second adds to the first
            token_loss(model, _own_tokens()).backward()
    for name, p in _experts(model).items():
        assert _pointer(p.grad) in {buffer.untyped_storage().data_ptr() for buffer in packed[: len(packed) // 2]}, name
    pointers = [buffer.untyped_storage().data_ptr() for buffer in packed]
    assert pointers and pointers[::2] == pointers[1::2]


def _with_other_names_in_torch_raises(folder):
    with (
        mock.patch.object(fsdp_groups, "_PARAM", ("_sharded_param_data", "_data_of_the_shard")),
        pytest.raises(MissingNameError, match="has no FSDPParam._data_of_the_shard, which epfsdp2 needs"),
    ):
        sharded_model(folder, WORLD, WORLD)


CASES = (
    _computes_with_its_shards_and_keeps_its_gradients,
    _on_a_gpu_has_fsdps_copies_unless_casts_are_kept,
    _whose_shards_move_holds_no_old_memory,
    _keeps_casts_while_weights_do_not_change,
    _left_gathered_is_freed_when_fsdp_reshards_it,
    _on_the_host_computes_with_copies,
    _with_replicas_has_fsdps_packed_buffer_as_gradient,
    _with_other_names_in_torch_raises,
)


def _check_each(folder):
    each_case([(case.__name__,) for case in CASES], lambda name: globals()[name](folder))


def test_single_rank_unit_in_every_case_computes_and_reduces_without_copies(tmp_path):
    run_ranks(_check_each, WORLD, save_qwen3_moe(tmp_path))


def test_same_buffer_after_an_error_is_allocated_anew_and_refuses_an_output_unlike_its_input():
    cpu, buffer = torch.device("cpu"), single_rank._SameBuffer()
    buffer.allocate((4,), dtype=torch.float32, device=cpu)  # nobody holds it: an error came before the output
    packed = buffer.allocate((4,), dtype=torch.float32, device=cpu)
    with pytest.raises(RuntimeError, match="an odd number of gradient buffers"):
        buffer.check_is_complete()
    assert buffer.allocate((4,), dtype=torch.float32, device=cpu) is packed
    buffer.check_is_complete()
    for size, dtype in ((5, torch.float32), (4, torch.bfloat16)):
        packed = buffer.allocate((4,), dtype=torch.float32, device=cpu)
        with pytest.raises(RuntimeError, match=f"packed 4 gradients of torch.float32 and asks for {size} of {dtype}"):
            buffer.allocate((size,), dtype=dtype, device=cpu)
        del packed
