"""The layout that ``layout/sglang_layout.py`` says of SGLang equals the one traced from SGLang's own loaders.

The loaders run on tensors without values, so this also shows what SGLang can't compute on a CPU: whole experts spread
over the workers (``ep_size``).
"""

import ctypes
import os
import sys
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from epfsdp2.recipes.quickstart.commands import sglang_environment
from epfsdp2.rollout.layout.specs import Heads, Rollout
from epfsdp2.rollout.sglang.layout import FAMILIES as KNOWN
from tests.rollout.families import config_of, model_on_meta
from tests.rollout.served_families import SERVED
from tests.rollout.sglang.sglang_families import SIZES
from tests.support.ranks import each_case, run_ranks
from tests.support.rollout.loader_trace import differing_layouts

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed (make setup STACK=sglang)")

DENSE = ("llama", "qwen2", "qwen3")


def _compare(folder, cases, expert_parallel):
    """Compare both layouts; a case is a family and changes of its config."""
    os.environ.update(sglang_environment(), VERL_PLATFORM="cpu")
    ctypes.CDLL(f"{sys.prefix}/lib/libcuda/libcuda.so.1", ctypes.RTLD_GLOBAL)
    models = [model_on_meta(config_of(family, **{**SIZES[family], **sizes})) for family, sizes in cases]
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.moe import utils as moe_utils
    from sglang.srt.model_loader.utils import get_model_architecture, set_default_torch_dtype
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    rank, world = dist.get_rank(), dist.get_world_size()
    rollout = Rollout(world, expert_parallel=expert_parallel, server="sglang")
    init_distributed_environment(world, rank, "env://", rank, "gloo")
    initialize_model_parallel(world, world if expert_parallel else 1)

    def check(family, index):
        model = models[index]
        model.config.architectures = [type(model).__name__]
        where = Path(folder) / f"{rank}-{index}"
        model.config.save_pretrained(where)
        arguments = ServerArgs(
            model_path=str(where),
            tp_size=world,
            ep_size=world if expert_parallel else 1,
            dtype=SERVED[family].dtype,
            device="cpu",
            attention_backend="torch_native",
            skip_tokenizer_init=True,
        )
        set_global_server_args_for_scheduler(arguments)
        config = ModelConfig.from_server_args(arguments)
        initialize_dp_attention(arguments, config)
        initialize_moe_config(*[arguments] * len(signature(initialize_moe_config).parameters))  # none from 0.5.20 on
        kind = get_model_architecture(config)[0]
        # From 0.5.20 on the loader decides whether shared experts are fused, before it makes the model.
        getattr(moe_utils, "install_shared_experts_fusion_decision", mock.Mock())(kind, config.hf_config, None)
        with set_default_torch_dtype(config.dtype):
            theirs = kind(config=config.hf_config, quant_config=None)
        # Latent attention's matrices are computed from values.
        theirs.post_load_weights = mock.Mock()
        heads, held = Heads.of(model.config), dict(theirs.named_parameters())
        differing = list(differing_layouts(model, held, theirs.load_weights, rollout, rank, heads))
        assert not differing, "\n".join(map(str, differing[:10]))

    each_case([(family, index) for index, (family, _) in enumerate(cases)], check)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_sglang_layout_of_every_family_with_cut_or_whole_experts_equals_the_traced_one(tmp_path, world, whole):
    families = [family for family in sorted(KNOWN) if not (whole and family in DENSE)]
    cases = [(family, {}) for family in families]
    # SGLang's OLMoE has as many keys as queries.
    cases += [(family, {"num_key_value_heads": 1}) for family in families if world == 2 and family != "olmoe"]
    run_ranks(_compare, world, str(tmp_path), cases, whole)
