"""Other libraries' experts layers, run by the Python of an environment of their own (``make peers``).

    .venv_peers/bin/python -m benchmarks.experts.peers torchtitan

Each line of JSON on the input has a line of JSON as its answer. The first line is a ``Geometry`` and builds the layer,
the others are ``{"times": n}`` and measure it. An error ends the process with the answer ``{"error": ...}``.
"""

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch import nn

from benchmarks.experts.layer import Geometry, Layer, kept_bytes, passes


def torchtitan(geometry: Geometry) -> tuple[Layer, list[nn.Parameter]]:
    """Its routed experts, without expert parallelism; they compute in bfloat16 whatever the dtype."""
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    sizes = {"dim": geometry.hidden, "hidden_dim": geometry.intermediate, "num_experts": geometry.experts}
    config = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(**sizes),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=geometry.experts, top_k=geometry.top_k),
    )
    with torch.device(geometry.device):
        experts = config.build().to(geometry.torch_dtype)
        gate_up = torch.empty(geometry.experts, 2 * geometry.intermediate, geometry.hidden, dtype=geometry.torch_dtype)
    geometry.fill(gate_up, experts.inner_experts.w2_EDF)
    gate, up = gate_up.chunk(2, dim=1)
    with torch.no_grad():
        experts.inner_experts.w1_EFD.copy_(gate)
        experts.inner_experts.w3_EFD.copy_(up)

    def layer(hidden_TD, experts_TK, weights_TK):
        counts_E = torch.bincount(experts_TK.flatten(), minlength=geometry.experts)
        return experts(hidden_TD[None], weights_TK[None], experts_TK[None], counts_E)[0]

    return layer, [*experts.parameters()]


def can_run_sonic_moe(geometry: Geometry) -> bool:
    return geometry.device.startswith("cuda") and sys.version_info >= (3, 12)


def sonic_moe(geometry: Geometry) -> tuple[Layer, list[nn.Parameter]]:
    """SonicMoE's layer for a router of one's own, with gate and up weights beside each other as Hugging Face has them.

    Raises:
        RuntimeError: there is no GPU, or this Python is older than its packages are for.
    """
    if not can_run_sonic_moe(geometry):
        raise RuntimeError("needs an H100 or newer, and Python 3.12")
    from sonicmoe import moe_general_routing_inputs
    from sonicmoe.enums import ActivationType

    shape = {"device": geometry.device, "dtype": geometry.torch_dtype}
    gate_up = nn.Parameter(torch.empty(geometry.experts, 2 * geometry.intermediate, geometry.hidden, **shape))
    down = nn.Parameter(torch.empty(geometry.experts, geometry.hidden, geometry.intermediate, **shape))
    geometry.fill(gate_up, down)

    def layer(hidden_TD, experts_TK, weights_TK):
        tokens_S = torch.arange(len(hidden_TD), dtype=torch.int32, device=hidden_TD.device)
        out, _ = moe_general_routing_inputs(
            hidden_TD,
            weights_TK.flatten(),
            tokens_S.repeat_interleave(geometry.top_k),
            experts_TK.flatten().int(),
            gate_up.permute(1, 2, 0),
            None,
            down.permute(1, 2, 0),
            None,
            geometry.experts,
            torch.cuda.current_stream().cuda_stream,
            ActivationType.SWIGLU,
            concat_layout=True,
        )
        return out

    return layer, [gate_up, down]


# By the names of their distributions.
PEERS: dict[str, Callable[[Geometry], tuple[Layer, list[nn.Parameter]]]] = {
    "torchtitan": torchtitan,
    "sonic-moe": sonic_moe,
}


def serve(name: str, answer: Callable[[dict], None]) -> None:
    geometry = Geometry(**json.loads(sys.stdin.readline()))
    torch.set_num_threads(1)
    layer, parameters = PEERS[name](geometry)
    inputs = geometry.inputs()
    answer({"version": version(name), "kept": kept_bytes(layer, inputs, parameters)})
    for line in sys.stdin:
        answer(passes(layer, inputs, parameters, json.loads(line)["times"]))


def main() -> int:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer

    def answer(fields: dict) -> None:
        print(json.dumps(fields), file=out, flush=True)

    try:
        serve(sys.argv[1], answer)
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
