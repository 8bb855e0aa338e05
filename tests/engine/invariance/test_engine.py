"""``engine.batch_invariant`` behind verl's worker: micro-batches, the check at the start, and equal updates."""

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.moe.gemm.backends import ROWS
from epfsdp2.engine.preflight.features import check_batch_invariant
from epfsdp2.engine.preflight.run import check_training
from tests.support.engine.sharded import whole_parameters
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import infer, of_this_rank, ppo_batch, ppo_samples, ppo_worker
from tests.support.trainer.settings import checkpoint, engine

WORLD = 2


def _inferred(worker, samples):
    """Return log-probs and entropies of each sample, without the last token's, whose label is another sample's."""
    output = infer(worker, samples)
    if not worker.engine.is_mp_src_rank_with_outputs():  # of ranks that share rows, one returns them
        return []
    return [part[:-1].clone() for key in ("log_probs", "entropy") for part in output[key].unbind()]


def _equal_in_micro_batches(folder):
    samples = ppo_samples()[:8]
    found = []
    for settings in (
        {"micro_batch": 1},
        {"micro_batch": 8},
        {"dynamic": True, "tokens": 60},
        {"micro_batch": 4, "ulysses_sequence_parallel_size": 2},
        {"micro_batch": 4, "pad_to_length": True, "pad_to_length_bucket": 48},
    ):
        worker = ppo_worker(folder, 2, batch_invariant=True, **settings)
        sizes = set()
        worker.engine.module.register_forward_pre_hook(
            lambda module, args, kwargs, sizes=sizes: sizes.add(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        found.append(_inferred(worker, samples))
        assert all(size % ROWS == 0 for size in sizes), sizes
        for number, (own, first) in enumerate(zip(found[-1], found[0], strict=False)):
            assert torch.equal(own, first), (settings, number)
    plain = _inferred(ppo_worker(folder, 2, micro_batch=8), samples)
    assert max((a - b).abs().max() for a, b in zip(plain, found[0], strict=True)) < 1e-5


def test_log_probs_and_entropies_of_any_micro_batches_have_the_same_bits(tmp_path):
    run_ranks(_equal_in_micro_batches, WORLD, save_qwen3_moe(tmp_path))


def _updated(folder):
    worker = ppo_worker(folder, 2, batch_invariant=True, activation_checkpointing="full")
    for _ in range(2):
        worker.train_batch(ppo_batch(of_this_rank(worker, ppo_samples())))
    return whole_parameters(worker.engine.module)


def _equal_twice(folder):
    first, second = _updated(folder), _updated(folder)
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]), name


def test_updates_twice_on_one_mesh_give_the_same_parameters(tmp_path):
    run_ranks(_equal_twice, WORLD, save_qwen3_moe(tmp_path))


def _refused(folder):
    from epfsdp2.engine.integration import language_model

    build = language_model.EPFSDP2EngineWithLMHead._patch

    def planted(self, module):
        build(self, module)
        if dist.get_rank() == 0:
            centre = lambda norm, args, out: out - out.mean(1, keepdim=True)  # noqa: E731
            module.model.norm.register_forward_hook(centre)

    language_model.EPFSDP2EngineWithLMHead._patch = planted
    with pytest.raises(Exception, match=r"engine.batch_invariant=True: model.norm \(Qwen3MoeRMSNorm\) computes other"):
        ppo_worker(folder, 2, batch_invariant=True)


def test_module_whose_bits_differ_ends_every_rank_at_the_start(tmp_path):
    run_ranks(_refused, WORLD, save_qwen3_moe(tmp_path))


@pytest.mark.parametrize(
    "settings, model, device, refused",
    [
        ({"experts_backend": "reference"}, {}, "cpu", "engine.batch_invariant=True"),
        ({"experts_backend": "transformers:grouped_mm"}, {}, "cpu", "engine.batch_invariant=True"),
        ({"experts_backend": "torch", "full_determinism": True}, {}, "cuda", "engine.batch_invariant=True"),
        ({"dispatcher": "deepep", "ep_size": 2}, {}, "cuda", "engine.dispatcher=deepep"),
        ({"compile_dense": True}, {}, "cpu", "engine.compile_dense=True"),
        ({"fuse_dense": False}, {}, "cuda", "engine.fuse_dense=False"),
        ({}, {}, "cuda", "engine.full_determinism=False"),
        ({}, {"use_remove_padding": False}, "cpu", "actor_rollout_ref.model.use_remove_padding=False"),
        ({}, {"use_fused_kernels": True}, "cpu", "actor_rollout_ref.model.use_fused_kernels=True"),
        (
            {"full_determinism": True},
            {"override_config": {"attn_implementation": "flex_attention"}},
            "cuda",
            "attn_implementation=flex",
        ),
        ({}, {"use_liger": True}, "cpu", "actor_rollout_ref.model.use_liger=True"),
    ],
)
def test_setting_whose_result_depends_on_other_sequences_is_refused(tmp_path, settings, model, device, refused):
    config = engine(batch_invariant=True, **settings)
    with pytest.raises(SettingError, match=refused):
        check_training(config, 2, checkpoint(tmp_path) | model, device=device)


def test_nothing_is_refused_without_the_setting_or_what_it_needs(tmp_path):
    model = checkpoint(tmp_path)
    check_training(engine(batch_invariant=True), 2, model, device="cpu")
    check_batch_invariant(engine(compile_dense=True), model | {"use_remove_padding": False}, "cuda")
    check_batch_invariant(engine(batch_invariant=True, full_determinism=True), model, "cuda")
