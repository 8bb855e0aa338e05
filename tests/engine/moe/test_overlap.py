"""Overlapping all-to-alls with compute changes no numbers; ``test_schedule.py`` has the order of launches."""

import contextlib
import importlib.util
import itertools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3MoeConfig

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.moe import overlap
from epfsdp2.engine.moe.chunks import DispatchSizes
from epfsdp2.engine.moe.find import find_experts
from epfsdp2.engine.moe.overlap import check_overlap
from tests.parity import families
from tests.support.engine.sharded import sharded_model, whole_gradients
from tests.support.models.own_model import PLAN, OwnModel
from tests.support.models.tiny import VOCAB, reference_model, relative_error, save_glm4_moe, save_qwen3_moe, token_loss
from tests.support.ranks import each_case, run_ranks
from tests.support.trainer.ppo import check_ppo_updates

RELATIVE = 1e-5
# Families whose block calls its shared experts after the experts, and before them.
AFTER = ["deepseek_v2", "deepseek_v3", "deepseek_v4", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite"]
AFTER += ["glm_moe_dsa", "hy_v3", "nemotron_h", "nemotron_h_latent", "solar_open"]
MOST = ["deepseek_v3", "deepseek_v4", "nemotron_h"]  # routers and blocks of three kinds
BEFORE = ["afmoe", "ernie4_5_moe", "hunyuan_v1_moe", "laguna", "qwen2_moe", "qwen3_next", "qwen3_5_moe"]


def _gradients_equal_the_reference(folder, world, cases):
    """Each rank has rows of another length; losses are weighted so that their mean is the one over all tokens."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, VOCAB, (1, 4 + 5 * r), generator=generator) for r in range(world)]
    reference = reference_model(folder).train()
    (sum(token_loss(reference, row) for row in rows) / world).backward()
    wanted = {name: param.grad for name, param in reference.named_parameters()}

    def check(ep, options):
        model, _ = sharded_model(folder, world, ep, **options)
        model.train()
        token_loss(model, rows[rank]).backward()
        errors = {name: relative_error(grad, wanted[name]) for name, grad in whole_gradients(model).items()}
        assert {name: error for name, error in errors.items() if not error < RELATIVE} == {}

    each_case(cases, check)


def _ppo_updates(folder, cases):
    with patch.object(overlap, "exchange", wraps=overlap.exchange) as exchanged:
        check_ppo_updates(folder, cases)
    assert {call.kwargs["chunks"] for call in exchanged.call_args_list} == {2}
    assert all(call.kwargs["shared"] is not None for call in exchanged.call_args_list)


def _exact(folder, cases, overlapped, updates):
    _gradients_equal_the_reference(folder, 4, cases)
    if importlib.util.find_spec("verl") is not None:
        _ppo_updates(overlapped, updates)


def test_exchange_in_chunks_has_the_gradients_of_the_plain_model_and_is_exact_in_ppo_updates(tmp_path):
    cases = [
        (4, {"dispatch_chunks": 3, "expert_shard_dim": 0}),
        (2, {"dispatch_chunks": 2, "checkpointing": "selective"}),
        (4, {"dispatch_chunks": 6, "checkpointing": "full", "prefetch_depth": 0}),
        (2, {"etp": 2, "dispatch_chunks": 3, "checkpointing": "full"}),
    ]
    update = {"ep": 2, "etp_size": 2, "overlap_shared_experts": True, "activation_checkpointing": "full"}
    updates = [update | {"dispatch_chunks": 2}]
    run_ranks(_exact, 4, save_qwen3_moe(tmp_path / "plain"), cases, save_glm4_moe(tmp_path / "shared"), updates)


def _families_are_exact(folders):
    """A block whose shared experts are not computed ahead, or not called, raises."""
    ids = torch.randint(0, VOCAB, (2, 13), generator=torch.Generator().manual_seed(1))
    ways = itertools.cycle([(2, "full"), (1, "none"), (3, "selective")])
    for (name, folder), (chunks, checkpointing) in zip(folders.items(), ways, strict=False):
        reference = families.load(name, folder).train()
        want = families.logits(reference, ids)
        families.loss(name, want, ids).backward()
        options = {"dispatch_chunks": chunks, "overlap_shared_experts": True, "checkpointing": checkpointing}
        model, _ = sharded_model(folder, 2, 2, attention="eager", **options)
        with torch.no_grad():
            assert relative_error(families.logits(model.eval(), ids), want) < RELATIVE, name
        families.loss(name, families.logits(model.train(), ids), ids).backward()
        got = whole_gradients(model)
        for param_name, param in reference.named_parameters():
            if param.grad is not None:
                assert relative_error(got[param_name], param.grad) < RELATIVE, (name, param_name)


@pytest.mark.parametrize("family", [*AFTER, *BEFORE])
def test_dispatch_sizes_and_check_overlap_of_a_family_tell_whether_its_shared_experts_can_overlap(family):
    model = families.FAMILIES[family].build()
    experts = find_experts(model)
    sizes = DispatchSizes.of(model, experts, torch.float32)
    # DeepSeek-V4's first layers route by token ids, which are not there.
    assert sizes.rows == 2 and sizes.shared == (family in AFTER and family != "deepseek_v4")
    refused = pytest.raises(SettingError, match="overlap_shared_experts=True: .* shared experts before the experts")
    with refused if family in BEFORE else contextlib.nullcontext():
        check_overlap(1, True, "all_to_all", model, experts)


def _first_is_refused(folder):
    """Refused before a weight is read; and when the block runs, if the check before can't tell."""
    ids = torch.randint(0, VOCAB, (2, 13), generator=torch.Generator().manual_seed(1))
    options = {"attention": "eager", "overlap_shared_experts": True}
    with pytest.raises(SettingError, match="calls its shared experts before the experts, or with"):
        sharded_model(folder, 2, 2, **options)
    with patch.object(overlap.DispatchSizes, "of_layer", lambda *_: None):
        model, _ = sharded_model(folder, 2, 2, **options)
    words = "overlap_shared_experts=True: .* calls its shared experts before the experts, or they"
    with pytest.raises(SettingError, match=words):
        families.logits(model, ids)


def _exact_or_refused(folders, first):
    _families_are_exact(folders)
    _first_is_refused(first)


@pytest.mark.parametrize("names", [MOST, pytest.param(sorted({*AFTER} - {*MOST}), marks=pytest.mark.long)], ids=len)
def test_overlap_of_shared_experts_computes_them_ahead_or_is_refused(tmp_path, names):
    folders = {name: families.save(name, tmp_path / name) for name in names}
    run_ranks(_exact_or_refused, 2, folders, families.save("qwen2_moe", tmp_path / "first"))


def test_check_overlap_refuses_a_model_without_shared_experts():
    model = build_on_meta(AutoModelForCausalLM, Qwen3MoeConfig(num_hidden_layers=1), torch.float32)
    with pytest.raises(SettingError, match=r"overlap_shared_experts=True: there are no shared experts beside model."):
        check_overlap(1, True, "all_to_all", model, find_experts(model))


def test_check_overlap_refuses_custom_experts():
    model = OwnModel(PretrainedConfig())
    settings = {
        "dispatch_chunks=2: Pool": (2, False, "all_to_all"),
        "overlap_shared_experts=True: Pool": (1, True, "all_to_all"),
        "dispatcher=deepep: Pool": (1, False, "deepep"),
    }
    for words, setting in settings.items():
        with pytest.raises(SettingError, match=words):
            check_overlap(*setting, model, find_experts(model, PLAN))
    check_overlap(1, False, "all_to_all", model, find_experts(model, PLAN))
