"""The estimate of the running step: printed at start, and compared with measured tensors."""

import contextlib
import io
import re
import shlex
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import Qwen3MoeConfig

from epfsdp2.engine.config import EPFSDP2ActorConfig, EPFSDP2EngineConfig
from epfsdp2.engine.planner import run
from epfsdp2.engine.planner.memory import IMBALANCE, Batch, peak
from epfsdp2.engine.planner.run import StepEstimate, configured_batch, format_plan
from epfsdp2.engine.planner.traffic import collectives
from epfsdp2.engine.topology.dtensor import local_tensor
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.recipes.plan.cards import config_of
from epfsdp2.recipes.plan.cli import parse, request_of
from tests.parity.families import FAMILIES
from tests.support.engine.memory import peak_of
from tests.support.models.mtp import save_with_mtp
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import of_this_rank, ppo_batch, ppo_samples, ppo_worker

# 16 sequences of at most 14 tokens: 8 on each of 2 ranks, 112 tokens, 3 times 40.
CONFIGURED = {"dynamic": True, "tokens": 40, "_sequences_per_update": 16, "_longest_sequence": 14}
ADAPTERS = {"dispatch_chunks": 2, "model": {"lora_rank": 4, "lora_alpha": 4, "target_modules": "all-linear"}}


def _update(worker):
    from verl.utils import tensordict_utils as tu

    batch = ppo_batch(of_this_rank(worker, ppo_samples()))
    tu.assign_non_tensor(batch, update_lr_scheduler=True)
    return tu.get(worker.train_batch(batch), "metrics")


def _trains(folder, settings):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        worker = ppo_worker(folder, ep=2, **settings)
        metrics = [_update(worker) for _ in range(2)]
    ours = [line.removeprefix("[epfsdp2] ") for line in said.getvalue().splitlines() if line.startswith("[epfsdp2]")]
    if dist.get_rank():
        assert ours == []
        return
    plan = worker.engine.run_plan
    assert ours.pop(0).startswith("engine.experts_backend=auto: torch computes the experts")
    assert ours.pop(0) == "packed rows: Qwen3MoeAttention: sdpa once per sequence"
    assert ours == plan.lines() and ours[0] == "plan of Qwen3MoeForCausalLM"

    # The recipe prints the same for the printed command.
    words = shlex.split(ours[-1].partition(": ")[2])
    assert words[:3] == ["python", "-m", "epfsdp2.recipes.plan"]
    options = parse(words[3:])
    request, topology = request_of(options, config_of(options.model)), Topology.arrange(2, 2)
    point = peak(request.sizes, topology, request.options, request.batch, request.optimizer, gloo=True)
    traffic = collectives(request.sizes, topology, request.options, request.batch)
    assert ours[1:5] == format_plan(topology, request.batch, point, traffic)
    assert (request.batch.tokens, request.batch.micro_batches) == (40, 3) and options.gpus * options.nodes == 2

    # The plan after an update is for its actual micro-batches.
    seen = Batch(plan._seen.tokens, plan._seen.micro_batches, IMBALANCE)
    assert seen.tokens <= 40 and 1 < seen.micro_batches <= 3
    planned = [both for (both,) in metrics[-1]["memory_max_planned_gib"]]
    assert planned[0] * 2**30 == pytest.approx(plan.peak(seen).total)
    # On a CPU only pages of the process could be measured; neither a metric nor a line has them.
    assert {name for m in metrics for name in m if name.startswith("memory_")} == {"memory_max_planned_gib"}
    assert plan.outcome() is None


def test_step_estimate_outcome_compares_tensors_with_tensors():
    request = request_of(parse(["--model", "Qwen3-30B-A3B"]), config_of("Qwen3-30B-A3B"))
    settings = request.sizes, Topology.arrange(8, 8), request.options, "adamw", None, (), "", 1, False
    plan = StepEstimate(*settings, measure=lambda: 3 << 30)
    assert plan.metrics() == {} and plan.outcome() is None
    plan.see(1024)
    assert plan.metrics()["memory_max_allocated_gib"] == 3 and plan.metrics()["memory_max_planned_gib"] > 3
    assert "measured 3.00 GiB (all tensors of the process, the most so far)" in plan.outcome()


@pytest.mark.parametrize("more", [pytest.param({}, marks=pytest.mark.long), ADAPTERS], ids=["plain", "adapters"])
def test_step_estimate_on_a_cpu_prints_the_plan_of_the_recipe_and_no_pages(tmp_path, more):
    run_ranks(_trains, 2, save_qwen3_moe(tmp_path), {**CONFIGURED, **more})


def _is_tracked(folder):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        worker = ppo_worker(folder, ep=2, micro_batch=4)
        _update(worker)
        with record_function("second update"):
            metrics = _update(worker)
    files = {file.stat().st_size for file in folder.glob("*.safetensors")}
    tracked = peak_of(profiler, "second update", files)[0]
    planned = metrics["memory_max_planned_gib"][dist.get_rank()][0] * 2**30
    assert tracked == pytest.approx(planned, rel=0.1), (tracked, planned)


def test_step_estimate_of_an_update_through_verls_worker_is_what_it_holds(tmp_path):
    wide = {"hidden_size": 128, "moe_intermediate_size": 256, "num_hidden_layers": 4, "mlp_only_layers": []}
    run_ranks(_is_tracked, 2, save_qwen3_moe(tmp_path, **wide))


def test_configured_batch_of_an_actor_follows_its_settings():
    lengths = {"max_prompt_length": 100, "max_response_length": 28}
    sizes = {"rollout_n": 4, "ppo_mini_batch_size": 32, "ppo_micro_batch_size_per_gpu": 2}
    engine = EPFSDP2ActorConfig(**sizes, rollout=lengths, engine=EPFSDP2EngineConfig(ulysses_sequence_parallel_size=2))
    engine = replace(engine.engine, micro_batch_size_per_gpu=2)  # as verl's worker does
    # 128 sequences; each pair of 8 ranks has 32, 2 at a time of which a rank has half the tokens.
    assert configured_batch(engine, Topology.arrange(8, 4)) == Batch(128, 16, IMBALANCE, 2)
    dynamic = replace(engine, use_dynamic_bsz=True, max_token_len_per_gpu=1024)
    assert configured_batch(dynamic, Topology.arrange(8, 4)) == Batch(1024, 2, IMBALANCE, 2)
    assert configured_batch(replace(engine, _longest_sequence=0), Topology.arrange(8, 4)) is None


def _shared_states(folder):
    model = {"override_config": {"attn_implementation": "sdpa"}}
    plan = ppo_worker(folder, ep=1, ulysses_sequence_parallel_size=2, model=model, mtp_loss_coef=0.1).engine.run_plan
    (line,) = (line for line in plan.lines() if line.startswith("not counted: "))
    assert "what Qwen3NextGatedDeltaNet sends" in line and "activations of the layers that draft" in line
    assert plan.sizes.heads == 4


def test_step_estimate_says_what_is_not_counted_of_shared_rows_and_drafts(tmp_path):
    run_ranks(_shared_states, 2, save_with_mtp(tmp_path / "model", FAMILIES["qwen3_next"], 1))


def _keeps_copies(folder):
    worker = ppo_worker(folder, ep=2, model={"in_background": True}, optimizer={"foreach": True})
    lines = worker.engine.run_plan.lines()
    assert any("1024 tokens are an example" in line for line in lines), "no length of sequences is set"
    (line,) = (line for line in lines if line.startswith("not counted: "))
    assert "foreach" in line
    _update(worker)
    worker.save_checkpoint(str(folder / "run" / "global_step_1" / "actor"), global_step=1)
    worker.engine._saves.wait()
    copied = sum(local_tensor(tensor).nbytes for tensor in worker.engine._saves._copies.values())
    (said,) = re.findall(r"on the host (\S+) MiB of copies, kept from save to save \(checkpoint.async_save\)", line)
    assert float(said) == pytest.approx(copied / 2**20, rel=0.02)


def test_step_estimate_counts_copies_of_saves_in_the_background_and_assumes_a_length(tmp_path):
    run_ranks(_keeps_copies, 2, save_qwen3_moe(tmp_path))


def test_step_estimate_names_memory_outside_of_torchs_allocator(monkeypatch):
    sizes = SimpleNamespace(
        get_nvl_buffer_size_hint=lambda nbytes, ranks: nbytes * ranks << 10,
        get_rdma_buffer_size_hint=lambda *_: 1 << 30,
    )
    buffer = SimpleNamespace(get_dispatch_config=lambda ranks: sizes, get_combine_config=lambda ranks: sizes)
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=buffer))
    model = SimpleNamespace(hf_config=Qwen3MoeConfig(hidden_size=2048))
    engine, topology = EPFSDP2EngineConfig(ep_size=4, dispatcher="deepep"), Topology.arrange(16, 4, 8)
    communicators, deepep = run._outside(engine, model, topology, "cuda")
    (*_, host) = run._outside(EPFSDP2EngineConfig(optimizer_offload=True), model, topology, "cuda")
    assert host.startswith("on the host up to twice the optimizer's states, pinned (engine.optimizer_offload; ")
    assert "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1" in host
    assert communicators == "buffers of 5 NCCL communicators (world, fsdp, dp_replicate, ep_fsdp, ep)"
    assert deepep.startswith("DeepEP's buffers (1.02 GiB)")
    assert run._outside(EPFSDP2EngineConfig(), model, topology, "cpu") == []
