"""Router replay routes tokens to the recorded experts, in every family, also in recomputations."""

import importlib.util
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.moe.find import UnsupportedModelError
from epfsdp2.engine.moe.outside.families import prepare
from epfsdp2.engine.moe.router.replay import ReplayError, RouterReplay
from epfsdp2.engine.mtp.layers import policy_experts
from tests.parity.families import FAMILIES, NEWER
from tests.support.engine.sharded import sharded_model, whole_gradients
from tests.support.models.tiny import VOCAB, reference_model, save_qwen3_moe, token_loss
from tests.support.moe.router_formula import routers
from tests.support.ranks import each_case, run_ranks
from tests.support.trainer.ppo import PADDED, ppo_batch, ppo_samples, ppo_worker

MODELS = {**FAMILIES, **NEWER}
# Two experts modules in a layer; layers that run several times; one expert for each token.
NOT_REPLAYED = ("ernie4_5_vl_moe", "inkling2_loop", "llama4", "zaya")
REPLAYED = [name for name in MODELS if name not in NOT_REPLAYED]


def _with_replay(model: nn.Module) -> RouterReplay:
    return RouterReplay(model, policy_experts(model), model.config.get_text_config().num_hidden_layers)


def _family(family: str):
    torch.manual_seed(0)
    model = MODELS[family].build().eval()
    prepare(model)
    model.set_experts_implementation("eager")
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # experts by token: no router
            first = torch.arange(len(buffer)) % 8
            buffer.copy_(torch.stack([first, (first + 3) % 8], dim=1))
    return model, torch.randint(3, 60, (2, 7))


def _shifted(routes: torch.Tensor, layers: Sequence[int], num_experts: int) -> torch.Tensor:
    shifted = routes.clone()
    shifted[:, layers] = (routes[:, layers] + 1) % num_experts
    return shifted


def _arriving(model: nn.Module) -> list[torch.Tensor]:
    """Collect the ids of every call of experts."""
    ids: list[torch.Tensor] = []
    for info in policy_experts(model):
        info.module.register_forward_pre_hook(lambda module, args: ids.append(args[1].clone()))
    return ids


@pytest.mark.parametrize("name", routers(REPLAYED))
@torch.no_grad()
def test_replay_of_every_family_takes_the_recorded_routes(name):
    model, ids = _family(name)
    replay = _with_replay(model)
    arriving = _arriving(model)

    def logits():
        arriving.clear()
        return model(input_ids=ids, use_cache=False).logits

    native = logits()
    replay.record()
    assert torch.equal(logits(), native)
    routes = replay.recorded()
    layers = sorted(replay._layers)
    assert routes.shape[:2] == (ids.numel(), model.config.get_text_config().num_hidden_layers)
    assert all(torch.equal(routes[:, layer].long(), own) for layer, own in zip(layers, arriving, strict=True))

    replay.replay(routes)
    assert torch.equal(logits(), native)
    assert replay.differing.take() == 0.0

    chosen = [layer for layer in layers if replay._layers[layer].is_replayed]
    assert chosen == (layers[1:] if name == "deepseek_v4" else layers)  # its first layer's experts go by the token
    shifted = _shifted(routes, chosen, policy_experts(model)[0].num_experts)
    replay.replay(shifted)
    other = logits()
    assert other.isfinite().all() and not torch.equal(other, native)
    assert all(torch.equal(shifted[:, layer].long(), own) for layer, own in zip(layers, arriving, strict=True))
    assert replay.differing.take() > 0.9

    # The router chooses for unrecorded rows: the first layer's ids are its own.
    half, first = ids.numel() // 2, layers.index(chosen[0])
    shifted[half:] = 0
    replay.replay(shifted)
    logits()
    assert torch.equal(arriving[first][:half], shifted[:half, chosen[0]].long())
    assert torch.equal(arriving[first][half:], routes[half:, chosen[0]].long())

    replay.stop()
    assert torch.equal(logits(), native)


def _trained(model, ids, seed):
    torch.manual_seed(seed)
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters())]


def test_replay_of_a_router_that_draws_at_random_takes_what_was_drawn():
    """In training Phi-3.5-MoE chooses by maxima of scores with noise; other noise, the same experts."""
    torch.manual_seed(0)
    model, ids = FAMILIES["phimoe"].build(router_jitter_noise=0.3).train(), torch.randint(3, 60, (2, 7))
    model.set_experts_implementation("eager")
    replay = _with_replay(model)
    arriving = _arriving(model)
    replay.record()
    native = _trained(model, ids, seed=1)
    routes = replay.recorded()
    layers = sorted(replay._layers)
    replay.replay(routes)
    assert all(torch.equal(a, b) for a, b in zip(_trained(model, ids, seed=1), native, strict=True))
    arriving.clear()
    other = _trained(model, ids, seed=2)
    assert all(torch.equal(routes[:, layer].long(), own) for layer, own in zip(layers, arriving, strict=True))
    assert all(grad.isfinite().all() for grad in other)
    replay.stop()
    arriving.clear()
    _trained(model, ids, seed=2)
    assert not all(torch.equal(routes[:, layer].long(), own) for layer, own in zip(layers, arriving, strict=True))


def test_replay_of_unusable_routes_raises(monkeypatch):
    model, _ = _family("ernie4_5_vl_moe")
    with pytest.raises(UnsupportedModelError, match=r"both .*text_moe.experts and .*vision_moe.experts are in it"):
        _with_replay(model)
    model, ids = _family("qwen3_moe")
    replay = _with_replay(model)
    monkeypatch.setattr("epfsdp2.engine.moe.router.replay._Replay.choose", lambda *args: None)
    replay.record()
    model(input_ids=ids, use_cache=False)
    routes = replay.recorded()
    replay.replay(_shifted(routes, sorted(replay._layers), 8))
    with pytest.raises(ReplayError, match=r"layers.0.mlp.experts got .* expert ids that no choice among 8 made"):
        model(input_ids=ids, use_cache=False)
    with pytest.raises(ReplayError, match=r"the shape \(14, 5, 2\), not \[tokens, 3, k\]"):
        replay.replay(torch.zeros(14, 5, 2))
    with pytest.raises(ReplayError, match="one expert per token"):
        replay.replay(torch.zeros(14, 3, 1))
    with pytest.raises(ReplayError, match="not called exactly once"):
        replay.recorded()


def test_replay_takes_the_current_routing_weights_with_their_gradient():
    """In Mixtral they are a softmax over all experts, restricted to the chosen ones and normalised."""
    model, ids = _family("mixtral")
    replay = _with_replay(model)
    replay.record()
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    routes = _shifted(replay.recorded(), sorted(replay._layers), 8)
    block = model.model.layers[0].mlp
    seen = {}
    block.gate.register_forward_hook(lambda module, args, output: seen.update(hidden=args[0]))
    block.experts.register_forward_pre_hook(lambda module, args: seen.update(weights=args[2]))
    replay.replay(routes)
    model(input_ids=ids, use_cache=False)
    scores = (seen["hidden"].reshape(-1, 48) @ block.gate.weight.T).softmax(-1).gather(1, routes[:, 0].long())
    torch.testing.assert_close(seen["weights"], scores / scores.sum(-1, keepdim=True))
    (weight,) = torch.autograd.grad(seen["weights"][:, 0].sum(), block.gate.weight)
    assert weight.abs().max() > 0


def _sharded_replays(folder):
    """Replay on two ranks, with every checkpointing and with cut experts."""
    rank = dist.get_rank()
    batch = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
    plain = reference_model(folder)
    replay = _with_replay(plain)
    replay.record()
    with torch.no_grad():
        plain(input_ids=batch, use_cache=False)
    recorded = replay.recorded()
    routes = _shifted(recorded, sorted(replay._layers), 8)
    replay.replay(routes)
    token_loss(plain, batch).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    # Ranks have 9 and 5 tokens, of which 4 and 1 differ in layer 2 of layers 0 and 2, which have experts.
    ids, tokens, differ = batch[rank : rank + 1], (9, 5)[rank], (4, 1)[rank]
    own = recorded.view(2, 9, *recorded.shape[1:])[rank, :tokens].clone()
    own[:differ] = _shifted(own[:differ], [2], 8)

    def check(ep, etp, checkpointing):
        installed = []
        install = {"before": lambda model: installed.append(_with_replay(model))}
        model, _ = sharded_model(folder, 2, ep, etp=etp, checkpointing=checkpointing, **install)
        sharded = installed[0]
        for _ in range(2):  # micro-batches
            sharded.replay(own)
            token_loss(model.train(), ids[:, :tokens]).backward()
        assert sharded.differing.take(dist.group.WORLD) == (4 + 1) / (2 * (9 + 5))
        assert sharded.differing.take(dist.group.WORLD) is None
        model.zero_grad()
        sharded.replay(routes.view(2, 9, *routes.shape[1:])[rank])
        token_loss(model, ids).backward()
        for name, found in whole_gradients(model).items():
            torch.testing.assert_close(found, wanted[name], rtol=1e-4, atol=1e-6, msg=name)

    each_case([(2, 1, "selective"), (2, 1, "full"), (1, 2, "full")], check)


def _two(folder):
    """Run verl's worker: the update takes the routes that the log-probs recorded (R2)."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import EngineRouterReplayConfig

    mine = ppo_samples()[4 * dist.get_rank() : 4 * dist.get_rank() + 4]
    results, routes = {}, []
    for mode in ("disabled", "R2", "R3"):
        replay = EngineRouterReplayConfig(mode=mode)
        worker = ppo_worker(folder, 2, router_replay=replay, activation_checkpointing="full")
        infer, train = ppo_batch(mine), ppo_batch(mine)
        if mode == "R3":
            # A rollout with another router in the last layer shifts the experts of all tokens on rank 0, and of one
            # sample on rank 1.
            last = [len(routes), 1][dist.get_rank()]
            shifted = [_shifted(own, [2], 8) if i < last else own for i, own in enumerate(routes)]
            counts = torch.tensor([sum(map(len, routes[:last])), 2 * sum(map(len, routes))])
            dist.all_reduce(counts)
            others = torch.nested.as_nested_tensor(shifted, layout=torch.jagged)
            infer["routed_experts"] = train["routed_experts"] = others
        tu.assign_non_tensor(infer, compute_loss=False)
        output = worker.infer_batch(infer)
        recorded = tu.get(output, "routed_experts")
        assert (recorded is not None) == (mode == "R2")
        if mode == "R2":
            train["routed_experts"], routes = recorded, recorded.unbind()
        results[mode] = tu.get(worker.train_batch(train), "metrics")
        results[mode]["log_probs"] = tu.get(output, "log_probs").values()

    plain, again, other = (results[mode] for mode in ("disabled", "R2", "R3"))
    assert torch.equal(again["log_probs"], plain["log_probs"]) and again["grad_norm"] == plain["grad_norm"]
    assert not torch.equal(other["log_probs"], plain["log_probs"]) and other["grad_norm"] != plain["grad_norm"]
    assert "router_replay_differing" not in plain
    assert again["router_replay_differing"] == [[0.0], [0.0]]  # of both ranks
    differing, replayed = counts.tolist()
    assert other["router_replay_differing"] == [[differing / replayed], [differing / replayed]]

    worker = ppo_worker(folder, 2, router_replay=EngineRouterReplayConfig(mode="R3"))
    with pytest.raises(ReplayError, match=r"router_replay.mode=R3: the rollout has left no routed_experts"):
        worker.train_batch(ppo_batch(mine))
    with pytest.raises(SettingError, match=r"use_remove_padding=False: .*along a packed row"):
        ppo_worker(folder, 2, model=PADDED, router_replay=EngineRouterReplayConfig(mode="R3"))


def _all(folder):
    _sharded_replays(folder)
    if importlib.util.find_spec("verl") is not None:
        _two(folder)


def test_replay_on_ranks_has_the_plain_gradients_and_a_ppo_update_takes_the_recorded_routes(tmp_path):
    run_ranks(_all, 2, save_qwen3_moe(tmp_path))
