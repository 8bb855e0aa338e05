"""For every family that vLLM's CPU build runs, a synced engine equals one started on the same weights."""

import pytest
import torch

from epfsdp2.engine.model import hf_names
from epfsdp2.rollout.vllm import names
from tests.rollout.served_families import SERVED, build, export, randomise, sent
from tests.support.rollout import verify

pytestmark = pytest.mark.e2e

# A loader with a shim, and renamed experts; the others are long tests.
QUICK = ("gpt_oss", "mixtral")

# vLLM's CPU kernels of these families compute in bfloat16 alone; Granite's only with AMX.
PLAIN = "tests.rollout.served.plain_linear_attention.PlainLinearAttention"
IN_BFLOAT16 = ("qwen3_next", "qwen3_5_moe", "qwen3_5_vl", "qwen3_5_moe_vl", "granitemoehybrid")
# Probabilities of these models in float32 differ by 2e-5 from float64, in bfloat16 by at least 5e-2.
ROUNDING = 1e-4
# vLLM's CPU build routes the first two differently (docs/weight_sync.md), and reads the last one's sinks in bfloat16.
OTHER_MODELS = ("ernie4_5_moe", "minimax_m2", "gpt_oss")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in SERVED])
def test_vllm_after_three_syncs_of_full_tensors_equals_a_fresh_engine(name, start_engine, tmp_path):
    served = SERVED[name]
    served.skip_where_broken()
    dtype = getattr(torch, served.dtype)
    model = build(name)
    folders = []
    for seed in range(4):
        randomise(model, seed)
        folders.append(export(model, dtype, tmp_path / str(seed), served.published))
    engine = start_engine(
        folders[1],
        again=True,
        environment=served.environment,
        # In one process all engines of a test start in the time of two.
        distributed_executor_backend="uni",
        dtype=served.dtype,
        **served.settings,
    )

    def computed():
        return engine.digests(), None if served.is_mute else engine.generate()

    fresh = [computed()]
    for folder in (*folders[2:], folders[0]):
        engine.call("start", timeout=120, model=folder).result()
        fresh.append(computed())
    *wanted, (digests, outputs) = fresh
    for seed, (wanted_digests, wanted_outputs) in enumerate(wanted, start=1):
        # Every parameter changes in every sync.
        assert [key for key, value in wanted_digests[0].items() if digests[0][key] == value] == []
        assert served.is_mute or outputs != wanted_outputs
        randomise(model, seed)
        # The last sync sends single experts, like a stream whose memory does not hold stacks.
        named = names.for_vllm if seed < len(wanted) else hf_names.as_singles
        engine.sync(lambda rank, named=named: named(model, sent(model, dtype)))
        digests, outputs = computed()
        assert verify.compare(wanted_digests[0], digests[0]) == ""
        assert outputs == wanted_outputs
    assert engine.leftovers() == []


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SERVED if name not in OTHER_MODELS])
def test_vllm_in_float32_computes_the_plain_models_log_probs(name, start_engine, tmp_path):
    """In bfloat16, the only dtype of some families' kernels, rounding would hide other differences."""
    served = SERVED[name]
    served.skip_where_broken()
    if served.is_mute:
        pytest.skip(f"vLLM's CPU build can't compute {name}")
    model = build(name).eval()
    randomise(model, 1)
    settings = {**({"extension": PLAIN} if name in IN_BFLOAT16 else {}), **served.settings}
    engine = start_engine(
        export(model, torch.float32, tmp_path, served.published),
        environment=served.environment,
        distributed_executor_backend="uni",
        max_model_len=112,
        **settings,
    )
    # Longer than a chunk of linear attention (64), shorter than a chunk, and shorter than a convolution.
    prompts = [torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (90, 37, 2)]
    for prompt, (generated, decoded, prefilled) in zip(prompts, engine.generating(prompts).result(), strict=True):
        with torch.no_grad():
            log_probs = model(torch.tensor([prompt + generated])).logits[0, :-1].log_softmax(-1)
        for row, plain in zip([*prefilled, *decoded], log_probs, strict=True):
            found = torch.tensor(list(row.values()))
            torch.testing.assert_close(found.exp(), plain[list(row)].exp(), rtol=0, atol=ROUNDING)
