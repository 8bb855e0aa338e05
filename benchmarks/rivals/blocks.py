"""The MoE block of this engine beside torchtitan's, each by its own ``parallelize``, in turns on the same cores.

    .venv_peers/bin/python -m benchmarks.rivals.blocks [--repeats 25]

A forward and backward of router, dispatch and experts of Qwen3-MoE with ``ep`` over all ranks, sharded by FSDP. Both
sides compute in bfloat16, because torchtitan's experts have no other dtype, and reduce gradients in float32.
"""

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from benchmarks.measure import figures_of, options
from benchmarks.rivals.measured import cells, largest_error, measured
from benchmarks.rivals.sides import OURS
from benchmarks.tables import report
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.parallelize import parallelize
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from tests.support.engine.sharded import whole_gradients

TITAN = "torchtitan"
SPEEDUP = 1.15  # over the rival's, as in compare.py
LARGEST_ERROR = 2e-2  # of gradients in bfloat16
CONFIG = Qwen3MoeConfig(
    hidden_size=256, moe_intermediate_size=512, num_experts=32, num_experts_per_tok=2, norm_topk_prob=True
)
WORLDS, TOKENS = (2, 4), (256, 1024, 4096)
MLP, MOE = "layers.0.mlp", "layers.0.moe"  # the names of this block and of torchtitan's


class Layer(nn.Sequential):
    """A block under the name that it has in a model."""

    moe_enabled = True  # which torchtitan asks for


class OneLayer(PreTrainedModel):
    """A model of this block alone."""

    config_class = Qwen3MoeConfig
    _no_split_modules = ["Layer"]

    def __init__(self) -> None:
        super().__init__(copy.deepcopy(CONFIG))  # which names the experts' implementation
        self.layers = nn.ModuleList([Layer(OrderedDict(mlp=Qwen3MoeSparseMoeBlock(self.config)))])
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.02, generator=generator)
            gate = self.layers[0].mlp.gate.weight
            gate.copy_(nn.functional.normalize(gate) / 4)

    def get_input_embeddings(self) -> None: ...

    def get_output_embeddings(self) -> None: ...

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layers[0](hidden)


def ours(world: int) -> nn.Module:
    model = OneLayer()
    options = ShardingOptions(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parallelize(model, build_meshes("cpu", Topology.arrange(world, world)), options)
    return model


def torchtitan(world: int) -> nn.Module:
    """Its block, sharded by its ``parallelize`` and ``apply_fsdp_to_decoder``."""
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common import config_utils
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    parallel_dims.device_type = "cpu"  # else it takes "cuda" where it finds no accelerator
    backend = "partial_dtensor"
    set_spmd_backend(backend)
    dims = parallel_dims.ParallelDims(
        dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=world, world_size=world, spmd_backend=backend
    )
    dims.build_mesh()
    sizes = {"dim": CONFIG.hidden_size, "num_experts": CONFIG.num_experts, "top_k": CONFIG.num_experts_per_tok}
    weights = ("w1_EFD", "w2_EDF", "w3_EFD")
    zeros = dict.fromkeys(("weight", *weights), nn.init.zeros_)
    router = config_utils.make_router_config(**sizes, gate_param_init=zeros, score_func="softmax", route_norm=True)
    experts = config_utils.make_routed_experts_config(
        **sizes, hidden_dim=CONFIG.moe_intermediate_size, param_init=zeros, comm_backend="standard"
    )
    config = config_utils.make_moe_config(
        num_experts=CONFIG.num_experts, router=router, routed_experts=experts, load_balance_coeff=None
    )
    # The layout under tensor parallelism, which is off.
    layouts = dict.fromkeys(weights)
    set_moe_sharding_config(config, enable_ep=True, enable_sp=False, expert_param_layout=layouts)
    moe = config.build()

    class Decoder(nn.Module):
        enable_weight_tying, tok_embeddings, norm, lm_head = False, None, None, None

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"0": Layer(OrderedDict(moe=moe))})

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.layers["0"](hidden)

    decoder = Decoder()
    decoder.load_state_dict(by_rivals_names(OneLayer().state_dict()))
    moe.parallelize(dims)
    apply_fsdp_to_decoder(
        decoder,
        dims.get_mesh(["fsdp"]),
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        ep_degree=world,
        edp_mesh=dims.get_mesh(["efsdp"]),
    )
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo can't multiply as it sums
    return decoder


def by_rivals_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return values or gradients of our model's parameters by torchtitan's names, gate and up apart."""
    gate, up = tensors[f"{MLP}.experts.gate_up_proj"].chunk(2, dim=1)
    experts = {"w1_EFD": gate, "w2_EDF": tensors[f"{MLP}.experts.down_proj"], "w3_EFD": up}
    named = {f"{MOE}.routed_experts.inner_experts.{name}": tensor for name, tensor in experts.items()}
    return named | {f"{MOE}.router.gate.weight": tensors[f"{MLP}.gate.weight"]}


class Side:
    """A block on this rank.

    Args:
        scale: of the loss, so that gradients are of the sum over the ranks.
        names: the plain model's tensors by the names here.
    """

    def __init__(self, model: nn.Module, scale: float, names: Callable[[dict], dict] = dict):
        self.model, self.scale, self.names = model.train(), scale, names

    def update(self, hidden: torch.Tensor) -> None:
        """A forward and backward; gradients of before are dropped."""
        self.model.zero_grad()
        (self.scale * self.model(hidden).float().square().sum()).backward()

    def error(self, hidden: torch.Tensor, wanted: dict[str, torch.Tensor]) -> float:
        """The largest relative error of a gradient; collective."""
        self.update(hidden)
        return largest_error(whole_gradients(self.model), self.names(wanted))


def inputs_and_gradients(world: int, tokens: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states of each rank, ``[world, 1, tokens, D]`` in bfloat16, and the plain block's gradients in float32.

    The scores of a token's two experts are far from the others, so that bfloat16 routes it as float32 does.
    """
    plain = OneLayer()
    block, generator = plain.layers[0].mlp, torch.Generator().manual_seed(tokens)
    rows = torch.randn(world, 1, tokens, CONFIG.hidden_size, generator=generator)
    chosen = torch.rand(world, 1, tokens, CONFIG.num_experts, generator=generator).topk(2, dim=-1).indices
    first, second = block.gate.weight.detach()[chosen].unbind(-2)
    whole = (rows + 48 * first + 32 * second).bfloat16()
    for row in whole:
        plain(row.float()).square().sum().backward()
    return whole, {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}


def _measure(repeats: int) -> list[dict]:
    """Return for each number of tokens the figures of ``measured`` and gradients' errors."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sides = {TITAN: Side(torchtitan(world), 1.0, by_rivals_names), OURS: Side(ours(world), float(world))}
    found = []
    for count in TOKENS:
        whole, wanted = inputs_and_gradients(world, count)
        hidden = whole[rank].clone().requires_grad_()
        errors = {name: side.error(hidden, wanted) for name, side in sides.items()}
        updates = {name: partial(side.update, hidden) for name, side in sides.items()}
        found.append(measured(updates, repeats) | {"error": errors})
    return found


def main() -> int:
    repeats = options(__doc__, repeats=25).parse_args().repeats
    rows = [
        {"ranks": str(world), "tokens of a rank": str(tokens), **cells(found, side, TITAN, SPEEDUP, LARGEST_ERROR)}
        for world in WORLDS
        for tokens, found in zip(TOKENS, figures_of(_measure, world, repeats), strict=True)
        for side in (TITAN, OURS)
    ]
    text = [
        "Forward and backward in bfloat16 of router, dispatch and experts, `ep` over all ranks, gradients reduced",
        f"in float32, one thread a rank. Sides take turns: medians of {repeats}, ratios within",
        f"a turn. Hidden {CONFIG.hidden_size}, {CONFIG.num_experts} experts of {CONFIG.moe_intermediate_size},",
        f"{CONFIG.num_experts_per_tok} for each token. Peak: bytes that a pass allocates at once, on the rank with the",
        "most. Wire: bytes that all ranks together receive. Gradient error: the largest relative error of a parameter",
        "against the plain block in float32 in one process.",
        "",
        f"Bound: {SPEEDUP} x.",
    ]
    return report("blocks", "An MoE block beside torchtitan's", "make bench-blocks", ("torch",), text, rows)


if __name__ == "__main__":
    sys.exit(main())
