"""For every family that vLLM's CPU build runs, a synced engine equals one started on the same weights."""

import pytest
import torch

from epfsdp2.engine.model import hf_names
from tests.rollout.served_families import SERVED, build, export, randomise, sent
from tests.support.rollout import verify

pytestmark = pytest.mark.e2e

# One whose loader needs a shim, one with names of its own, one with tied embeddings, two dense ones; the others take
# too long for every run of the suite.
QUICK = ("gpt_oss", "mixtral", "gemma4", "qwen3", "llama")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in SERVED])
def test_vllm_after_three_syncs_of_full_tensors_equals_a_fresh_engine(name, start_engine, tmp_path):
    served = SERVED[name]
    served.skip_where_broken()
    dtype = getattr(torch, served.dtype)
    model = build(name)
    folders = []
    for seed in range(4):
        randomise(model, seed)
        folders.append(export(model, dtype, tmp_path / str(seed)))
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
        # Nothing may pass because it does not change.
        assert [key for key, value in wanted_digests[0].items() if digests[0][key] == value] == []
        assert served.is_mute or outputs != wanted_outputs
        randomise(model, seed)
        # The last as the stream does where stacks do not fit its memory: expert by expert, as a checkpoint has them.
        fused = seed < len(wanted)
        engine.sync(lambda rank, fused=fused: hf_names.for_vllm(model, sent(model, dtype), may_be_fused=fused))
        digests, outputs = computed()
        assert verify.compare(wanted_digests[0], digests[0]) == ""
        assert outputs == wanted_outputs
    assert engine.leftovers() == []
