"""Adapters alone, from trainer ranks to vLLM; vLLM's own adapter loader accepts their names and shapes."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from epfsdp2.engine.compat import versions
from epfsdp2.engine.lora.adapters import A, B, Lora, lora_of
from epfsdp2.engine.lora.peft_files import adapter_config, write_adapter
from epfsdp2.engine.lora.rollout_names import RolloutNames
from epfsdp2.engine.lora.settings import LoraSettings
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.topology.dtensor import is_adapter
from epfsdp2.rollout.layout.specs import Rollout
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from epfsdp2.rollout.transport.checksums import with_checksums
from epfsdp2.rollout.vllm.adapter import WeightSyncError
from epfsdp2.rollout.vllm.names import ADAPTED_AS_STACKS
from tests.rollout.served_families import build
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import save_qwen3
from tests.support.ranks import run_ranks
from tests.support.rollout.sent_slices import weights_for
from tests.support.rollout.verls_transport import send

pytestmark = pytest.mark.e2e

RANK = 8
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEARS = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]  # of a dense model
SEEDS = (5, 6)
# verl's names of the one adapter that a server has.
NAME = ("123", 123, "simon_lora_path")


def _settings(targets):
    return LoraSettings("model", RANK, 16, targets if isinstance(targets, str) else tuple(targets))


def _drawn(model, seed):
    """Return a function that draws an adapter's full parameter by its name."""

    def read(name):
        generator = torch.Generator().manual_seed(seed * 1000 + sum(name.encode()))
        return torch.randn(model.get_parameter(name).shape, generator=generator) * 0.3

    return read


def _send(tensors, handles):
    """Send tensors to the worker beside this rank; return their bytes."""
    counted = []

    def counting():
        for name, tensor in tensors:
            counted.append(tensor.nbytes)
            yield name, tensor

    send(with_checksums(counting()), handles)
    return sum(counted)


def _base_and_adapters(folder, targets, adapters, handles, mode, tp):
    """Send the base without adapters, then two adapters one after the other."""
    rank = dist.get_rank()
    model, meshes = sharded_model(
        Path(folder),
        tp,
        ep=tp if targets == ATTENTION else 1,
        attention="eager",
        before=lambda model: Lora(model, _settings(targets)),
        initialize=lambda name, tensor, fits: is_adapter(name),
        finish=lambda model: lora_of(model).initialize(model, 0),
    )
    sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings(mode, 1 << 20))
    lora = lora_of(model)
    lora.initialize(model, 0, _drawn(model, 1))  # values that must not reach the base
    _send(weights_for(sync, Rollout(tp), rank, "left out").tensors(), handles)
    for seed, out in zip(SEEDS, adapters, strict=True):
        read = _drawn(model, seed)
        lora.initialize(model, 0, read)
        if rank == 0:
            write_adapter(Path(out), lora, folder, read)
        sent = _send(sync.weights("alone").for_rollout(None, rank).tensors(), handles)
        assert sent == sum(p.nbytes for name, p in model.named_parameters() if is_adapter(name))


@pytest.mark.parametrize(
    ("mode", "tp", "targets"),
    [
        ("sliced", 1, ATTENTION),
        pytest.param("full", 2, ATTENTION, marks=pytest.mark.long),
        pytest.param("sliced", 2, ATTENTION, marks=pytest.mark.long),
        pytest.param("sliced", 2, LINEARS, marks=pytest.mark.long),
    ],
    ids=["sliced-1", "full-2", "sliced-2", "sliced-2-dense"],
)
def test_adapters_alone_equal_those_that_vllm_loads_from_a_file(start_engine, checkpoints, tmp_path, mode, tp, targets):
    if targets == ATTENTION and versions.vllm_in(">=0.29"):
        pytest.skip("with adapters its CPU build chooses Triton's experts, which it lacks")
    served, trained = (Path(each.path) for each in checkpoints[:2])
    if targets == LINEARS:
        sizes = {"vocab_size": 200, "head_dim": 32}  # of the prompts, and of vLLM's attention on a CPU
        served, trained = (save_qwen3(tmp_path / f"model {seed}", seed, **sizes) for seed in (1, 2))
    settings = {"tp_size": tp, "enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": targets}
    if tp == 1:
        settings |= {"distributed_executor_backend": "uni", "again": True}
    on_meta = build_on_meta(AutoModelForCausalLM, AutoConfig.from_pretrained(trained), torch.float32)
    config = adapter_config(Lora(on_meta, _settings(targets)), str(trained))
    engine = start_engine(str(served), **settings)
    handles, found = [engine.handle(rank) for rank in range(tp)], []
    for is_base in (True, False, False):
        arguments = {"use_shm": True, "sync_timeout_seconds": 150.0, "peft_config": config, "verify": True}
        engine.call("update_weights_from_ipc", timeout=200.0, base_sync_done=not is_base, **arguments)
        found.append(_state(engine, None if is_base else NAME))
    adapters = [str(tmp_path / str(seed)) for seed in SEEDS]
    run_ranks(_base_and_adapters, tp, str(trained), targets, adapters, handles, mode, tp)
    (base, _, generated), *synced = [[part.result() for part in parts] for parts in found]
    assert engine.leftovers() == []
    fresh = start_engine(str(trained), **settings)
    wanted, _, plain = (part.result() for part in _state(fresh, None))
    assert (base, generated) == (wanted, plain)
    for number, folder in enumerate(adapters):
        outputs = fresh.generating(adapter=(str(number), number + 1, folder)).result()
        digests = fresh.call("epfsdp2_adapter_digests").result()
        assert synced[number] == [wanted, digests, outputs]
        assert outputs != plain
    assert synced[0][1] != synced[1][1]


def _state(engine, adapter):
    """Request a worker's digests of weights and adapter, and its outputs."""
    return (
        engine.call("epfsdp2_digests"),
        engine.call("epfsdp2_adapter_digests"),
        engine.generating(adapter=adapter),
    )


def _sent_of(family):
    """Return a family's model, its adapters with values, and all that is sent of them."""
    model = build(family)
    lora = Lora(model, _settings("all-linear"))
    lora.initialize(model, 0, _drawn(model, 7))
    names, values = RolloutNames(model, lora, ADAPTED_AS_STACKS), dict(model.named_parameters())
    tensors = {}
    for name in lora.targets:
        for own, tensor in names.tensors(name, values[name + A].detach(), values[name + B].detach()):
            assert own not in tensors
            tensors[own] = tensor
    return model, lora, tensors


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe"])
def test_adapters_of_experts_are_packed_by_vllm_into_the_stacks_of_the_trainer(family):
    from vllm.lora.lora_weights import PackedLoRALayerWeights

    model, lora, tensors = _sent_of(family)
    loaded = _loaded(model, lora, tensors)
    parts = ("w1", "w2", "w3") if family == "mixtral" else ("gate_proj", "down_proj", "up_proj")
    modules = {name.partition(".experts.")[0] for name in loaded if ".experts." in name}
    assert modules
    for module in modules:
        layer = module.split(".")[:3]  # the rest is a name of checkpoints
        own = next(n for n in lora.targets if n.endswith("experts.gate_up_proj") and n.split(".")[:3] == layer)
        experts = lora.targets[own].experts
        each = [loaded[f"{module}.experts.{e}.{part}"] for e in range(experts) for part in parts]
        packed = PackedLoRALayerWeights.pack_moe(each, module)
        up_a, up_b = (model.get_parameter(own + half) for half in (A, B))
        down = own.replace("gate_up_proj", "down_proj")
        gate, rise = up_b.chunk(2, dim=1)
        down_a, down_b = (model.get_parameter(down + half) for half in (A, B))
        for i, (a, b) in enumerate([(up_a, gate), (down_a, down_b), (up_a, rise)]):
            assert torch.equal(packed.lora_a[i], a) and torch.equal(packed.lora_b[i], b)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5_moe"])
def test_adapters_of_experts_that_checkpoints_stack_have_the_form_that_vllm_reshapes(family):
    model, lora, tensors = _sent_of(family)
    loaded = _loaded(model, lora, tensors)
    for name, target in lora.targets.items():
        if target.experts is None:
            continue
        module = name.rpartition(".")[0] + (".base_layer" if name.endswith("gate_up_proj") else "")
        found, a, b = loaded[module], model.get_parameter(name + A), model.get_parameter(name + B)
        # As vLLM's LoRAModelManager._stack_moe_lora_weights splits them.
        assert torch.equal(found.lora_a.reshape(target.experts, -1, a.shape[-1]), a)
        assert torch.equal(found.lora_b.reshape(b.shape[1], -1, target.experts).permute(2, 0, 1), b)


def _loaded(model, lora, tensors):
    """The adapters that vLLM's own loader makes of all tensors, by module."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_dict(adapter_config(lora, "base"))
    loaded = LoRAModel.from_lora_tensors(1, tensors, helper, device="cpu").loras
    assert len(loaded) * 2 == len(tensors)
    assert all(each.lora_a is not None and each.lora_b is not None for each in loaded.values())
    return loaded


def test_adapters_without_a_layer_end_the_sync_with_their_name():
    from epfsdp2.rollout.vllm.adapters import load_adapters

    manager = SimpleNamespace(modules={"layers.0.q_proj"})
    held = dict.fromkeys(("layers.0.q_proj.base_layer", "layers.0.o_proj"))
    manager.get_adapter = lambda number: SimpleNamespace(loras=held)
    worker = mock.Mock(model_runner=SimpleNamespace(model=SimpleNamespace(lora_manager=manager)))
    with pytest.raises(WeightSyncError, match=r"^1 adapters were sent that vLLM's model has no layers for: layers.0.o"):
        load_adapters(worker, {}, {})
    worker.remove_lora.assert_called_once_with(NAME[1])
