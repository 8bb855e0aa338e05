"""The wrap plan as data, and ``parallelize``, which executes it."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForImageTextToText

from epfsdp2.engine.compat.fsdp_groups import parameter_groups
from epfsdp2.engine.fsdp import single_rank
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.fsdp.unit import stages_of
from epfsdp2.engine.fsdp.wrap_plan import compute_dtypes, wrap_plan
from epfsdp2.engine.model.layers import layer_names, set_mtp
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.parallelize import parallelize
from epfsdp2.engine.preflight.rollout import tensors_before_sharding
from epfsdp2.engine.topology.dtensor import shard_steps
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from tests.parity.families import ALL
from tests.support.models.vlm import vlm_config
from tests.support.ranks import each_case, run_ranks

WORLD = 4
LOW, FULL = torch.bfloat16, torch.float32


def _family(name="qwen3_moe", **sizes):
    """Three layers; the second of Qwen3-MoE has no experts."""
    with torch.device("meta"):
        return ALL[name].build(**sizes)


def _vision():
    return build_on_meta(AutoModelForImageTextToText, vlm_config("qwen3_vl_moe"), FULL)


class _Sinks(nn.Module):
    """A parameter that is kept in float32 among modules that are not; one of them has a norm that is."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(4))
        self.q, self.k = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.q.norm = nn.RMSNorm(4)


class _KeptInFloat32(nn.Module):
    _no_split_modules = ("_Sinks",)
    _keep_in_fp32_modules_strict = ("sinks", "norm")

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([_Sinks(), _Sinks()])

    def get_input_embeddings(self):
        return None

    get_output_embeddings = get_input_embeddings


def _layer(i, part=""):
    return f"model.layers.{i}{part}"


def _gathered(i, *, experts=True):
    return (_layer(i), *([_layer(i, ".mlp.experts")] if experts else []))


def test_wrap_plan_of_a_moe_has_experts_then_layers_then_ends_then_the_root():
    model = _family()
    plan = wrap_plan(model, ShardingOptions(prefetch_depth=2))
    assert [(unit.kind, unit.modules) for unit in plan] == [
        ("experts", (_layer(0, ".mlp.experts"),)),
        ("experts", (_layer(2, ".mlp.experts"),)),
        *(("layer", (_layer(i),)) for i in range(3)),
        ("embeddings", ("model.embed_tokens",)),
        ("head", ("lm_head",)),
        ("root", ("",)),
    ]
    units = {unit.name: unit for unit in plan}
    experts, layer, root = units[_layer(0, ".mlp.experts")], units[_layer(0)], units[""]
    assert dict(experts.shapes) == {
        _layer(0, ".mlp.experts.gate_up_proj"): (8, 36, 48),
        _layer(0, ".mlp.experts.down_proj"): (8, 48, 18),
    }
    assert set(experts.ep_dims.values()) == {0} and not experts.casts_inputs and layer.casts_inputs
    assert _layer(0, ".mlp.gate.weight") in layer.shapes and set(root.shapes) == {"model.norm.weight"}
    assert {unit.param_dtype for unit in plan} == {LOW} and {unit.reduce_dtype for unit in plan} == {FULL}
    resharded = {name: unit.reshard_after_forward for name, unit in units.items()}
    assert resharded.pop("lm_head") is False and resharded.pop("") is None and set(resharded.values()) == {True}
    assert [name for name, unit in units.items() if not unit.unshard_in_backward] == ["model.embed_tokens"]
    # Dense parameters before experts; the embeddings are not gathered in backward.
    assert {name: unit.forward_prefetch for name, unit in units.items() if unit.forward_prefetch} == {
        "": ("model.embed_tokens", *_gathered(0)),
        "model.embed_tokens": (*_gathered(0), *_gathered(1, experts=False)),
        _layer(0): (*_gathered(1, experts=False), *_gathered(2)),
        _layer(1): (*_gathered(2), "lm_head"),
        _layer(2): ("lm_head",),
    }
    assert {name: unit.backward_prefetch for name, unit in units.items() if unit.backward_prefetch} == {
        "": ("lm_head", *_gathered(2)),
        "lm_head": (*_gathered(2), *_gathered(1, experts=False)),
        _layer(2): (*_gathered(1, experts=False), *_gathered(0)),
        _layer(1): _gathered(0),
    }
    assert not any(unit.forward_prefetch for unit in wrap_plan(model, ShardingOptions(prefetch_depth=0)))


def test_wrap_plan_of_a_layer_that_drafts_with_a_head_of_its_own_has_it_as_a_unit_that_stays_gathered():
    model, own = _family(), _layer(1, ".transformer.output")
    model.get_submodule(_layer(1)).transformer = nn.ModuleDict({"output": nn.Linear(48, 96, device="meta")})
    set_mtp(model, [_layer(1)], heads=[own])
    unit = next(unit for unit in wrap_plan(model, ShardingOptions()) if unit.modules == (own,))
    assert unit.shapes.keys() == {f"{own}.weight", f"{own}.bias"} and unit.stage == _layer(1)
    assert unit.reshard_after_forward is False and not unit.casts_inputs  # temperatures stay float32


def test_wrap_plan_gathers_embeddings_with_a_norm_in_backward():
    """As Inkling's."""
    model = _family()
    model.get_input_embeddings().embed_norm = nn.RMSNorm(48, device="meta")
    (embeddings,) = [unit for unit in wrap_plan(model, ShardingOptions()) if unit.kind == "embeddings"]
    assert embeddings.unshard_in_backward


def test_wrap_plan_of_a_named_router_gathers_it_in_float32_between_its_layer_and_the_experts():
    options = ShardingOptions(fp32_modules=["*.1.mlp.gate"], reshard_experts_after_forward=False)
    units = {unit.name: unit for unit in wrap_plan(_family("glm4_moe"), options)}
    router, experts = units[_layer(1, ".mlp.gate")], units[_layer(1, ".mlp.experts")]
    assert router.kind == "float32" and router.param_dtype == FULL and router.stage == _layer(1)
    assert router.casts_inputs and not router.casts_outputs
    assert experts.reshard_after_forward is False and not experts.is_gathered_again and router.is_gathered_again
    assert units[_layer(0)].forward_prefetch == (_layer(1), _layer(1, ".mlp.gate"), _layer(1, ".mlp.experts"))


def test_wrap_plan_of_a_class_that_keeps_its_router_in_float32_leaves_a_frozen_correction_bias_whole():
    model, options = _family("ernie4_5_moe"), ShardingOptions()
    plan = wrap_plan(model, options)
    biases = [name for name, param in model.named_parameters() if not param.requires_grad]
    assert [name for unit in plan for name in unit.unsharded] == biases and biases
    kept = [unit for unit in plan if unit.kind == "float32"]
    assert kept and all(not unit.casts_inputs and unit.casts_outputs and unit.param_dtype == FULL for unit in kept)
    # A weight sync reads dtypes and shard steps off the plan.
    dtypes, tensors = compute_dtypes(model, options), tensors_before_sharding(model, Topology.arrange(4, 2))
    cuts = {tensor.name: tensor.cuts for tensor in tensors if tensor.name in dtypes}
    assert list(dtypes) == list(cuts) == [name for name, _ in model.named_parameters()]
    assert {name for name, dtype in dtypes.items() if dtype == FULL} == {
        *biases,
        *(name for unit in kept for name in unit.shapes),
    }
    assert [name for name, of_one in cuts.items() if not of_one] == biases
    # In a float32 model nothing has to be kept apart.
    alone = wrap_plan(model, ShardingOptions(param_dtype=FULL))
    assert {unit.kind for unit in alone} == {"experts", "layer", "embeddings", "head", "root"}


def test_wrap_plan_of_a_parameter_kept_in_float32_wraps_its_siblings_as_one_unit_before_its_owner():
    plan = wrap_plan(_KeptInFloat32(), ShardingOptions())
    assert [(unit.kind, unit.modules, set(unit.shapes)) for unit in plan if "layers.0" in unit.name] == [
        ("float32", ("layers.0.q.norm",), {"layers.0.q.norm.weight"}),
        ("low_precision", ("layers.0.q", "layers.0.k"), {"layers.0.q.weight", "layers.0.k.weight"}),
        ("float32", ("layers.0",), {"layers.0.sinks"}),
    ]
    assert {unit.stage for unit in plan} == {"layers.0", "layers.1", "root"}
    # The layer itself is the unit that is kept in float32, and says what is gathered ahead.
    ahead = {unit.name: unit.forward_prefetch for unit in plan if unit.forward_prefetch}
    first, second = ((f"layers.{i}", f"layers.{i}.q", f"layers.{i}.q.norm") for i in range(2))
    assert ahead == {"": first, "layers.0": second}


def test_wrap_plan_of_a_tied_dense_model_leaves_embeddings_and_head_to_the_root():
    plan = wrap_plan(_family("llama", num_hidden_layers=2), ShardingOptions())
    assert [unit.name for unit in plan] == [_layer(0), _layer(1), ""]
    assert set(plan[-1].shapes) == {"model.embed_tokens.weight", "model.norm.weight"}
    assert [unit.forward_prefetch for unit in plan] == [(_layer(1),), (), (_layer(0),)]
    untied = wrap_plan(_family(), ShardingOptions(head_in_root=True))
    assert [unit.kind for unit in untied[-2:]] == ["embeddings", "root"] and "lm_head.weight" in untied[-1].shapes


def test_wrap_plan_of_a_frozen_vision_tower_trains_the_rest_and_gathers_no_layer_of_it_in_backward():
    for unit in wrap_plan(_vision(), ShardingOptions(freeze_vision_tower=True)):
        assert unit.frozen == {name for name in unit.shapes if name.startswith("model.visual.")}
        assert unit.unshard_in_backward == (".visual." not in f".{unit.name}." and unit.kind != "embeddings"), unit.name


def test_wrap_plan_of_a_vision_model_has_a_chain_of_its_own_for_the_vision_layers():
    model = _vision()
    units = {unit.name: unit for unit in wrap_plan(model, ShardingOptions())}
    vision = [name for name in layer_names(model) if "visual" in name]
    text = [name for name in layer_names(model) if "visual" not in name]
    assert len(vision) == len(text) == 3
    ahead = [(units[name].forward_prefetch, units[name].backward_prefetch) for name in vision]
    assert ahead == [((vision[1],), ()), ((vision[2],), (vision[0],)), ((), (vision[1],))]
    # No unit of the language model prefetches vision layers, nor the other way round.
    assert not any(
        name in vision for unit in units.values() if unit.name not in vision for name in unit.forward_prefetch
    )
    assert units[text[0]].forward_prefetch == (text[1], f"{text[1]}.mlp.experts")
    stages = stages_of(list(units.values()), layer_names(model))
    assert [stage.name for stage in stages] == ["root", "embeddings", *layer_names(model), "head"]


def _as_fsdp_has_it(model):
    """Return a plan's fields for each FSDP state, by the FQN of its first module, from FSDP's own records."""
    fqns = {module: fqn for fqn, module in model.named_modules()}
    states = dict.fromkeys(m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule))
    found = {}
    for state in states:
        policy = state._mp_policy
        found[fqns[state._modules[0]]] = {
            "modules": {fqns[module] for module in state._modules},
            "dtypes": (policy.param_dtype, policy.reduce_dtype, policy.cast_forward_inputs),
            "FSDP decides": state._auto_reshard_after_forward,
            "forward": [fqns[ahead._modules[0]] for ahead in state._states_to_forward_prefetch],
            "backward": [fqns[ahead._modules[0]] for ahead in state._states_to_backward_prefetch],
            "params": set(),
        }
        for group in parameter_groups(state._modules[0]):
            infos = [param._module_info for param in group.fsdp_params]
            found[fqns[state._modules[0]]] |= {
                "params": {f"{fqns[info.module]}.{info.param_name}" for info in infos},
                "mesh": group.mesh_info.mesh,
                "reshards": group.post_forward_mesh_info is not None,
                "unshards": group.unshard_in_backward,
                "factor": group.gradient_divide_factor,
                "reduced in place": isinstance(group._reduce_scatter_comm, single_rank._SameBuffer),
                "copies nothing": "post_backward" in vars(group),
            }
    return found


def _as_planned(plan, meshes):
    found = {}
    for unit in plan:
        decides = unit.reshard_after_forward is None
        found[unit.name] = {
            "modules": set(unit.modules),
            "dtypes": (unit.param_dtype, unit.reduce_dtype, unit.casts_inputs),
            "FSDP decides": decides,
            "forward": list(unit.forward_prefetch),
            "backward": list(unit.backward_prefetch),
            "params": set(unit.shapes),
        }
        alone = unit.ranks(meshes.topology) == 1
        if unit.shapes:
            found[unit.name] |= {
                "mesh": meshes.experts_shard if unit.is_experts else meshes.dense_shard,
                "reshards": decides or unit.reshard_after_forward,  # until FSDP knows which module is the root
                "unshards": unit.unshard_in_backward,
                "factor": None if alone else unit.divide_factor(meshes.topology),
                "reduced in place": alone and meshes.topology.dp_replicate > 1,
                "copies nothing": alone and meshes.topology.dp_replicate == 1,
            }
    return found


CASES = [
    ("qwen3_moe", (2, -1), {}),
    ("qwen3_moe", (4, -1), {"prefetch_depth": 2, "reshard_experts_after_forward": False}),
    ("qwen3_moe", (2, 2), {"head_in_root": True, "reduce_dtype": LOW, "expert_shard_dim": 1}),
    ("qwen3_moe", (2, -1), {"param_dtype": FULL, "prefetch_depth": 0, "reshard_after_forward": False}),
    ("glm4_moe", (2, -1), {"fp32_modules": ["*.mlp.gate", "lm_head"]}),
    ("ernie4_5_moe", (4, 4), {}),
    ("llama", (1, -1), {}),
    ("vision", (2, -1), {"prefetch_depth": 2}),
    ("kept in float32", (1, 2), {}),
]
OWN = {"vision": _vision, "kept in float32": _KeptInFloat32}


def _is_what_fsdp_has(name, sizes, settings):
    meshes, options = build_meshes("cpu", Topology.arrange(WORLD, *sizes)), ShardingOptions(**settings)
    model = OWN[name]() if name in OWN else _family(name)
    plan = wrap_plan(model, options)
    held = sorted(name for unit in plan for name in (*unit.shapes, *unit.unsharded))
    assert held == sorted(name for name, _ in model.named_parameters())
    cuts = {n: u.cuts(n, meshes.topology, options.expert_shard_dim) for u in plan for n in u.shapes}
    parallelize(model, meshes, options)
    assert _as_fsdp_has_it(model) == _as_planned(plan, meshes)
    for name, param in model.named_parameters():
        assert set(shard_steps(param)) == set(cuts.get(name, ())), name
    assert wrap_plan(model, options) == plan  # made of the sharded model


def _check_each():
    each_case(CASES, _is_what_fsdp_has)


def test_parallelize_of_every_unit_does_what_the_wrap_plan_says():
    run_ranks(_check_each, WORLD)
