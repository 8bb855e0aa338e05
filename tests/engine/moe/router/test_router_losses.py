"""Load-balancing loss, z-loss and load metrics for the routers of every family, over the tokens of all ranks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from epfsdp2.engine.config import EPFSDP2EngineConfig
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.lora.adapters import lora_of
from epfsdp2.engine.moe.dispatch import combine, dispatch
from epfsdp2.engine.moe.find import UnsupportedModelError, find_experts
from epfsdp2.engine.moe.outside.families import prepare
from epfsdp2.engine.moe.router.losses import RouterLosses
from epfsdp2.engine.preflight.run import check_training
from tests.parity.families import FAMILIES, save
from tests.support.engine.lora import SETTINGS, adapt, stirred
from tests.support.engine.sharded import whole_gradients
from tests.support.models.tiny import reference_model, save_glm4_moe, save_qwen3_moe
from tests.support.moe.router_formula import routers, watched_routers
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import SAMPLES, of_this_rank, ppo_batch, ppo_samples, ppo_worker

AUX, Z = 0.3, 0.05
WORLD = 2
NOT_WATCHED = ("ernie4_5_vl_moe",)  # two experts modules in a layer


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('one')}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", routers(name for name in FAMILIES if name not in NOT_WATCHED))
def test_router_losses_of_every_family_equal_their_formula(name):
    """A router's weight is the only parameter of shape [experts, hidden] in the block of the experts."""
    torch.manual_seed(0)
    model = FAMILIES[name].build().eval()
    prepare(model)
    model.set_experts_implementation("eager")
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("tid2eid"):
            buffer.random_(0, 8)
    experts = find_experts(model)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for info in experts:
        info.module.register_forward_pre_hook(lambda module, args: seen.append((args[0], args[1])))
    losses = RouterLosses(model, experts, AUX, Z)
    ids = torch.randint(3, 60, (2, 7))
    native = model(input_ids=ids, use_cache=False).logits
    losses.begin(torch.tensor(ids.numel()))
    losses.watch()
    watched = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(watched, native)
    loss = losses.loss(torch.ones(ids.numel(), dtype=torch.bool))
    assert loss is not None and loss.isfinite()
    loss.backward()
    moved = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    for info in experts:
        block = info.fqn.rpartition(".")[0]
        routers = [n for n, p in model.named_parameters() if n.startswith(block) and p.shape[0] == info.num_experts]
        assert any(n in moved for n in routers if n.rpartition(".")[0] != info.fqn), (info.fqn, routers, moved)
    found = losses.metrics()
    assert found["router_load_max"] >= 1 >= found["router_load_min"]
    assert loss.item() == pytest.approx(AUX * found["router_aux_loss"] + Z * found["router_z_loss"], rel=1e-5)


def _plain_losses(model: nn.Module, sigmoid: bool, samples) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses, averaged over the layers, of samples as one micro-batch."""
    with watched_routers(model, find_experts(model), sigmoid) as losses:
        for tokens, *_ in samples:
            model(input_ids=tokens[None], use_cache=False)
        return losses()


def _mean_losses(model: nn.Module, sigmoid: bool, samples, per_rank: int, micro_batch: int):
    """Return the losses, averaged over the tokens of a step, whose micro-batches span all ranks."""
    aux, z, tokens = [], [], []
    for first in range(0, per_rank, micro_batch):
        ranks = [samples[own + first : own + first + micro_batch] for own in range(0, len(samples), per_rank)]
        together = [sample for own in ranks for sample in own]
        tokens.append(sum(len(ids) for ids, *_ in together))
        losses = _plain_losses(model, sigmoid, together)
        aux.append(losses[0] * tokens[-1])
        z.append(losses[1] * tokens[-1])
    return sum(aux) / sum(tokens), sum(z) / sum(tokens)


def _updates_of_adapters(folder):
    """Compare the losses' part of the adapters' gradients: adapters change the inputs of later routers."""
    samples, gradients = ppo_samples(), []
    attention = SETTINGS | {"target_modules": ["q_proj", "v_proj", "o_proj"]}
    for losses in ({}, {"router_aux_loss_coef": AUX, "router_z_loss_coef": Z}):
        worker = ppo_worker(folder, 2, micro_batch=SAMPLES // WORLD, model=attention, **losses)
        model = worker.engine.module
        lora_of(model).initialize(model, 0, stirred(model))
        reference = reference_model(folder)
        leaves = adapt(reference, model)
        gradients.append(_gradients(worker, ppo_batch(of_this_rank(worker, samples)))[0])
    aux, z = _mean_losses(reference, False, samples, SAMPLES // WORLD, SAMPLES // WORLD)
    (AUX * aux + Z * z).backward()
    without, with_losses = gradients
    assert all(grad.abs().max() == 0 for name, grad in with_losses.items() if name not in leaves)
    for name, leaf in leaves.items():
        error = (with_losses[name] - without[name] - leaf.grad).norm() / leaf.grad.norm()
        assert error < 1e-4, (name, error.item())


def _updates(folder, sigmoid, cases):
    """The gradients of an update are those without the losses plus those of the losses over all ranks' tokens."""
    samples, reference = ppo_samples(), reference_model(folder)
    losses = {"router_aux_loss_coef": AUX, "router_z_loss_coef": Z, "router_metrics": True}
    for micro_batch, settings in cases:
        per_rank = SAMPLES * settings.get("ulysses_sequence_parallel_size", 1) // dist.get_world_size()
        reference.zero_grad()
        aux, z = _mean_losses(reference, sigmoid, samples, per_rank, micro_batch)
        (AUX * aux + Z * z).backward()
        wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
        worker = ppo_worker(folder, micro_batch=micro_batch, **settings)
        without, _ = _gradients(worker, ppo_batch(of_this_rank(worker, samples)))
        worker = ppo_worker(folder, micro_batch=micro_batch, **settings, **losses)
        with_losses, metrics = _gradients(worker, ppo_batch(of_this_rank(worker, samples)))
        if worker.engine.is_mp_src_rank_with_outputs():
            assert metrics["router_aux_loss"] == pytest.approx(aux.item(), rel=1e-5), settings
            assert metrics["router_z_loss"] == pytest.approx(z.item(), rel=1e-5), settings
            assert metrics["router_dropped"] == 0, settings
        for name, grad in wanted.items():
            added = with_losses[name] - without[name]
            error = (added - grad).norm() / grad.norm()
            assert error < 1e-4, (settings, name, error.item())


def _gradients(worker, batch):
    """Return full gradients before the optimizer's step, by name, and the update's metrics."""
    from verl.utils import tensordict_utils as tu

    seen = {}
    engine = worker.engine
    step = engine.clipped_step

    def keep(optimizer):
        for name, grad in whole_gradients(engine.module).items():
            seen[name] = torch.zeros(engine.module.get_parameter(name).shape) if grad is None else grad.clone()
        return step(optimizer)

    engine.clipped_step = keep
    keep.metrics = step.metrics
    output = worker.train_batch(batch)
    metrics = tu.get(output, "metrics") if engine.is_mp_src_rank_with_outputs() else {}
    return seen, {
        name: torch.tensor(value).mean().item() for name, value in metrics.items() if name.startswith("router_")
    }


HALF, WHOLE = SAMPLES // WORLD // 2, SAMPLES // WORLD
MESHES = [
    (WHOLE, {"ep": 2, "ulysses_sequence_parallel_size": 2}),
    (WHOLE, {"ep": 1, "etp_size": 2, "activation_checkpointing": "full"}),
    (HALF, {"ep": 2, "activation_checkpointing": "selective", "pad_to_length": True, "pad_to_length_bucket": 64}),
]
# The router's scores change with its sigmoid, not the sums over ranks.
SIGMOID = [(HALF, {"ep": 2, "activation_checkpointing": "full"})]
# Rows that each of the two ranks leaves out, for each layer's experts; and the number of dropped pairs.
LEFT_OUT = [(1, 3), (2, 0)]
DROPPED = [({"ep": 2}, 6), ({"ep": 1}, 6), ({"ep": 1, "etp_size": 2}, 5)]


def _drops(folder):
    """Experts that leave out the last rows that they get."""
    from verl.utils import tensordict_utils as tu

    def leave_out(rows, group, etp_group, hidden, ids, weights, compute):
        sent = dispatch(hidden, ids, 8, group, etp_group)
        kept = len(sent.rows_RD) - rows
        counts = sent.counts_e.cumsum(0).clamp(max=kept).diff(prepend=sent.counts_e.new_zeros(1))
        out = torch.cat([compute(sent.rows_RD[:kept], counts), sent.rows_RD.new_zeros(rows, hidden.shape[1])])
        return combine(out, sent, weights)

    for settings, dropped in DROPPED:
        worker = ppo_worker(folder, micro_batch=SAMPLES // WORLD, router_metrics=True, **settings)
        for info, rows in zip(find_experts(worker.engine.module), LEFT_OUT, strict=True):
            runtime = info.module._epfsdp2
            runtime.exchange = partial(leave_out, rows[dist.get_rank()], runtime.group, runtime.etp_group)
        batch = ppo_batch(of_this_rank(worker, ppo_samples()))
        found = tu.get(worker.train_batch(batch), "metrics")["router_dropped"]
        assert torch.tensor(found).unique().tolist() == [dropped], settings


def _all(softmax, sigmoid):
    _updates(softmax, False, MESHES)
    _updates(sigmoid, True, SIGMOID)
    _updates_of_adapters(softmax)
    _drops(softmax)


def test_router_losses_are_over_the_tokens_of_all_ranks_and_dropped_pairs_are_counted_once(tmp_path):
    run_ranks(_all, WORLD, save_qwen3_moe(tmp_path / "softmax"), save_glm4_moe(tmp_path / "sigmoid"), timeout=400)


def test_router_losses_of_unsuitable_models_are_refused(tmp_path):
    model = FAMILIES["ernie4_5_vl_moe"].build()
    with pytest.raises(UnsupportedModelError, match="both .*text_moe.experts and .*vision_moe.experts are in it"):
        RouterLosses(model, find_experts(model), AUX)
    folder = save("ernie4_5_vl_moe", tmp_path)
    settings = EPFSDP2EngineConfig(router_metrics=True)
    with pytest.raises(SettingError, match=r"engine.router_metrics=True.*are in it"):
        check_training(
            settings, 2, {"path": str(folder), "override_config": {"attn_implementation": "sdpa"}}, device="cpu"
        )
    with pytest.raises(SettingError, match=r"engine.router_z_loss_coef=-1.*0 or more"):
        EPFSDP2EngineConfig(router_z_loss_coef=-1)
