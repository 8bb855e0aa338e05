"""Weights of multi-token prediction layers from trainer ranks to the drafter of a real vLLM."""

import os
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.mtp.layers import add_mtp_layers
from epfsdp2.rollout.layout.specs import Heads, Rollout
from epfsdp2.rollout.sent_tensors import tensor_specs
from epfsdp2.rollout.servers import planned_layout
from tests.rollout.served_families import SERVED
from tests.support.engine.sharded import sharded_model
from tests.support.models.mtp import DRAFTS, is_beside, save_with_mtp
from tests.support.ranks import run_ranks
from tests.support.rollout.verls_transport import send

pytestmark = [pytest.mark.e2e, DRAFTS]

_EXTEND = partial(add_mtp_layers, count=1, dtype=torch.float32)
_IN_DECODER = ("model.layers.2.eh_proj", "model.layers.2.mtp_block.input_layernorm")
_BESIDE = ("mtp.fc", "mtp.layers.0.input_layernorm")
_COPIES = r"\.(embed_tokens|shared_head\.head)\.weight$"


def _layouts(folder, rollout):
    config = AutoConfig.from_pretrained(folder)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = build_on_meta(auto, config, torch.float32, extend=_EXTEND)
    tensors, heads = tensor_specs(model, drafts=True), Heads.of(config)
    return [planned_layout(tensors, rollout, worker, heads) for worker in range(rollout.workers)]


def _sync(folder, handles, rollout, mode):
    from epfsdp2.engine.model.layers import layer_names
    from epfsdp2.rollout.sync import RolloutSync, SyncSettings
    from epfsdp2.rollout.transport.checksums import with_checksums

    ranks = dist.get_world_size()
    own = {"extend": _EXTEND, "may_be_unused": _COPIES}
    model, meshes = sharded_model(Path(folder), ranks, ep=ranks, attention="eager", **own)
    sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings(mode, 5 << 18, server="vllm", drafts=True))
    send(with_checksums(sync.weights().for_worker(mode, rollout).tensors()), handles, megabytes=2)


@pytest.mark.parametrize(
    ("family", "mode", "tp"),
    [
        ("glm4_moe", "sliced", 2),
        pytest.param("glm4_moe", "full", 1, marks=pytest.mark.long),
        pytest.param("deepseek_v3", "sliced", 1, marks=pytest.mark.long),
        pytest.param("hy_v3", "sliced", 2, marks=pytest.mark.long),
        pytest.param("nemotron_h", "sliced", 2, marks=pytest.mark.long),
        pytest.param("nemotron_h", "full", 1, marks=pytest.mark.long),
        pytest.param("qwen3_next", "sliced", 2, marks=pytest.mark.long),
        pytest.param("qwen3_5_moe_vl", "sliced", 2, marks=pytest.mark.long),
        pytest.param("qwen3_5_moe_vl", "full", 1, marks=pytest.mark.long),
    ],
)
def test_drafter_after_three_syncs_equals_a_fresh_one(start_engine, tmp_path, family, mode, tp):
    served, rollout = SERVED[family], Rollout(tp, tower="none" if family.endswith("_vl") else "sharded")
    first, second = (str(save_with_mtp(tmp_path / str(seed), served.family, 1, seed)) for seed in (1, 2))
    settings = {"tp_size": tp, "dtype": served.dtype, "environment": served.environment, **served.settings}
    settings["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}

    def found(engine):
        digests = [answer["digests"] for answer in engine.call("epfsdp2_digests").result()]
        return digests, None if served.is_mute else engine.generate()

    fresh = {second: found(start_engine(second, **settings))}
    engine = start_engine(first, **settings)
    fresh[first] = found(engine)
    differ = {name for name, value in fresh[first][0][0].items() if fresh[second][0][0][name] != value}
    beside = ("mtp.layers.0.eh_proj", "mtp.layers.1.norm") if family == "nemotron_h" else _BESIDE
    own = beside if is_beside(family) else _IN_DECODER
    assert {f"drafter.{name}.weight" for name in own} <= differ
    with mock.patch.dict(os.environ, served.environment):
        if mode == "sliced":
            engine.call("epfsdp2_check_layout", layouts=_layouts(first, rollout)).result()
        for folder in (second, first, second):
            engine.call("update_weights_from_ipc", timeout=200.0, use_shm=True, sync_timeout_seconds=150.0, verify=True)
            run_ranks(_sync, tp, folder, [engine.handle(rank) for rank in range(tp)], rollout, mode)
            (digests, outputs), (wanted, wanted_outputs) = found(engine), fresh[folder]
            pairs = zip(digests, wanted, strict=True)
            assert not {n for of, want in pairs for n in of.keys() | want.keys() if of.get(n) != want.get(n)}
            assert outputs == wanted_outputs
    assert engine.leftovers() == []
