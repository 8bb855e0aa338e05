"""verl's fused linear cross-entropy (``model.use_fused_kernels``): what the plain model computes, or a no."""

import contextlib
import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight.features import check_fused_kernels
from tests.parity.families import ALL
from tests.parity.family import HEADS, SCALED
from tests.support.models.tiny import reference_model, relative_error, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import (
    PADDED,
    infer,
    plain_log_probs,
    ppo_batch,
    ppo_samples,
    ppo_worker,
    reference_update,
    watched_gradients,
)

FUSED = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}
# verl has forwards of its own for models with images.
TEXT = [name for name, family in ALL.items() if family.model.endswith("ForCausalLM")]


OTHERS = [name for name in TEXT if name not in ("qwen3_moe", "gpt_oss", "dbrx", *SCALED)]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [pytest.param(name, {}, marks=[pytest.mark.long] * (name in OTHERS)) for name in TEXT]
    + [(name, {key: value}) for name, key, value in HEADS],
    ids=TEXT + [f"{name} {key}" for name, key, _ in HEADS],
)
@torch.no_grad()
def test_fused_kernels_of_every_family_are_exact_or_refused(name, sizes, monkeypatch):
    from verl.models.transformers.monkey_patch import patch_forward_with_backends

    torch.manual_seed(0)
    model = replace(ALL[name], sizes=ALL[name].sizes | sizes).build().eval()
    for param in model.parameters():
        param.normal_(std=0.1) if param.dim() > 1 else param.uniform_(0.5, 1.5)
    model.set_experts_implementation("eager")
    ids = torch.randint(3, 60, (2, 7))
    labels = ids.roll(-1, dims=-1)
    wanted = (model(input_ids=ids, use_cache=False).logits / 0.7).log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    facts = SimpleNamespace(model=copy.deepcopy(model).to("meta"), name=type(model).__name__)
    more = sizes or name in SCALED
    why = "attribute `model`, which DbrxForCausalLM has not" if name == "dbrx" else "by the head's weight alone"
    with pytest.raises(SettingError, match=why) if more or name == "dbrx" else contextlib.nullcontext():
        check_fused_kernels(FUSED, facts)

    monkeypatch.setattr(type(model), "forward", type(model).forward)  # so that it comes back
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
    inputs = {"input_ids": ids, "use_cache": False, "temperature": 0.7, "shift_labels": labels, "return_dict": True}
    if name == "dbrx":
        with pytest.raises(AttributeError, match="no attribute 'model'"):
            model(**inputs)
        return
    assert torch.allclose(model(**inputs).log_probs, wanted, rtol=1e-5, atol=1e-5) != bool(more)


def test_fused_kernels_of_a_critic_or_of_triton_without_an_accelerator_are_refused():
    with pytest.raises(SettingError, match="critic.model.use_fused_kernels=True: .* a critic has none"):
        check_fused_kernels(FUSED, None, setting="critic.model")
    triton = FUSED | {"fused_kernel_options": {"impl_backend": "triton"}}
    check_fused_kernels(triton, None, device="cuda")
    with pytest.raises(SettingError, match="impl_backend=triton: .*impl_backend=torch"):
        check_fused_kernels(triton, None, device="cpu")


def _update(folder):
    from verl.utils import tensordict_utils as tu

    plain, samples = reference_model(folder), ppo_samples()
    loss = reference_update(plain, samples)
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    mine = samples[8 * dist.get_rank() :][:8]
    every = [plain_log_probs(plain, ids) for ids, *_ in mine]
    # From here on the class has the fused forward, for the plain model too.
    for model in (FUSED, FUSED | PADDED):
        worker = ppo_worker(folder, 2, model=model)
        output = infer(worker, mine)
        found = [tu.get(output, name).unbind() for name in ("log_probs", "entropy")]
        for log_probs, entropy, wanted in zip(*found, every, strict=True):
            torch.testing.assert_close((log_probs[:-1], entropy), wanted, rtol=1e-5, atol=1e-5)
        seen = watched_gradients(worker, steps=False)
        metrics = tu.get(worker.train_batch(ppo_batch(mine)), "metrics")
        assert abs(metrics["loss"] - loss) < 1e-5 * abs(loss) + 1e-6
        for name, want in gradients.items():
            assert relative_error(seen[name], want) < 1e-5, (model, name)


def test_fused_kernels_in_an_update_equal_the_plain_model(tmp_path):
    run_ranks(_update, 2, save_qwen3_moe(tmp_path))
