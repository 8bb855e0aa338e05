"""One value update through verl's TrainingWorker on 2 ranks against the plain model in one process."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification

from epfsdp2.engine.config import EPFSDP2CriticConfig, EPFSDP2EngineConfig
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.lora.adapters import SAVED, lora_of
from epfsdp2.engine.preflight.run import check_training
from epfsdp2.recipes.convert.export import export
from tests.support.engine.lora import SETTINGS, adapt, adapters_of, stirred
from tests.support.engine.sharded import whole_parameters, whole_tensor, whole_tensors
from tests.support.models.published import stored_values
from tests.support.models.tiny import VOCAB, relative_error, save_glm4_moe, save_qwen3, save_qwen3_moe
from tests.support.models.vlm import save_vlm
from tests.support.ranks import each_case, run_ranks
from tests.support.trainer.ppo import PADDED, RESPONSE, of_this_rank, ppo_batch, ppo_samples, watched_gradients
from tests.support.trainer.verl_worker import training_worker

WORLD, PER_RANK = 2, 4
RELATIVE, OF_FLOAT16 = 1e-5, 2e-2


def _worker(folder, ep, model=None, **settings):
    from verl.workers.utils.losses import value_loss

    engine = EPFSDP2EngineConfig(
        ep_size=ep,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        infer_micro_batch_size_per_gpu=2,
        **{"mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32"}, **settings},
    )
    critic = EPFSDP2CriticConfig(engine=engine, ppo_micro_batch_size_per_gpu=2)
    return training_worker(folder, "value_model", engine, partial(value_loss, config=critic), **(model or {}))


def _plain_model(folder, own_class, head):
    """The model in one process with the worker's head; the head's rows are drawn, so they are copied."""
    config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa", num_labels=1, classifier_dropout=0.0)
    auto = AutoModelForTokenClassification if own_class else AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        auto = AutoModelForImageTextToText
    model = auto.from_pretrained(folder, config=config, dtype=torch.float32)
    if not own_class:
        model.set_output_embeddings(torch.nn.Linear(config.get_text_config().hidden_size, 1, bias=False))
    model.load_state_dict(head, strict=False)
    return model


def _keeps_its_head(folder):
    worker = _worker(folder, 2)
    head = whole_tensor(worker.engine.module.get_parameter("lm_head.weight"))
    assert torch.equal(head, stored_values(folder)["lm_head.weight"])


def test_critic_of_a_trained_head_reads_it_also_without_a_class_in_transformers(tmp_path):
    folder = save_glm4_moe(tmp_path, one_file=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(1, tensors["lm_head.weight"].shape[1])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run_ranks(_keeps_its_head, WORLD, folder)


def _value_update(folder, own_class, model, settings):
    # The last tokens of a vocabulary may stand for images.
    samples = [(ids % (VOCAB - 16), *others) for ids, *others in ppo_samples(WORLD * PER_RANK)]
    worker = _worker(folder, 2, model, **settings)
    bound = RELATIVE
    if worker.engine.scaler is not None:
        # So small a model overflows with the scale that a run starts with.
        worker.engine.scaler.value, bound = 2.0**8, OF_FLOAT16
    lora = lora_of(worker.engine.module)
    if lora is not None:
        lora.initialize(worker.engine.module, 0, stirred(worker.engine.module))
    seen = watched_gradients(worker)
    head = {  # with adapters the copy that is trained
        name.removesuffix(SAVED): param
        for name, param in whole_parameters(worker.engine.module).items()
        if name.startswith(("score.", "lm_head.")) and (lora is None or name.endswith(SAVED))
    }
    width = worker.engine.module.config.get_text_config().hidden_size
    assert sum(tensor.numel() for name, tensor in head.items() if name.endswith("weight")) == width

    def batch(chosen):
        data = ppo_batch(chosen)
        response = [len(old) for _, _, old, _ in chosen]
        values, returns = torch.zeros(len(chosen), RESPONSE), torch.zeros(len(chosen), RESPONSE)
        for i, (_, _, old, advantage) in enumerate(chosen):
            returns[i, : response[i]] = advantage
            values[i, : response[i]] = old * 0.1
        data["returns"], data["values"] = returns, values
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(data, global_batch_size=WORLD * PER_RANK)
        return data

    plain = _plain_model(folder, own_class, head)
    leaves = {} if lora is None else adapt(plain, worker.engine.module)
    if lora is not None:
        leaves |= {name + SAVED: plain.get_parameter(name).requires_grad_() for name in head}
    worker.train_batch(batch(of_this_rank(worker, samples)))

    tokens = sum(len(old) for _, _, old, _ in samples)
    losses = []
    for ids, prompt, old, advantage in samples:
        values = plain(input_ids=ids[None], use_cache=False).logits[0, prompt - 1 : -1, 0]
        clipped = torch.minimum(torch.maximum(values, old * 0.1 - 0.5), old * 0.1 + 0.5)
        losses.append(0.5 * torch.maximum((values - advantage) ** 2, (clipped - advantage) ** 2).sum())
    (torch.stack(losses).sum() / tokens).backward()
    leaves = leaves or dict(plain.named_parameters())
    wanted = {name: p.grad for name, p in leaves.items() if p.grad is not None}
    assert wanted.keys() == seen.keys()
    errors = {name: relative_error(seen[name], want) for name, want in wanted.items()}
    assert {name: error for name, error in errors.items() if not error < bound} == {}


def _saves(folder, out):
    _worker(folder, 2, SETTINGS).save_checkpoint(str(out), global_step=1)


@pytest.mark.parametrize("own_class", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_critics_adapter_is_checked_with_its_head_before_a_worker_starts(tmp_path, own_class):
    folder = (save_qwen3_moe if own_class else save_glm4_moe)(tmp_path / "model")
    run_ranks(_saves, WORLD, folder, tmp_path / "saved")
    adapter, head = tmp_path / "saved" / "lora_adapter", "score" if own_class else "lm_head"
    attention = {"attn_implementation": "sdpa"}
    model = {"path": str(folder), "override_config": attention, "lora_rank": 4, "lora_adapter_path": str(adapter)}

    def check(setting):
        return check_training(EPFSDP2EngineConfig(ep_size=2), WORLD, model, device="cpu", setting=setting)

    assert check("critic.model") is not None
    # The actor has no such module, or one with as many outputs as it has tokens.
    with pytest.raises(SettingError, match=rf"^actor_rollout_ref\.model\..*{head}"):
        check("actor_rollout_ref.model")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors[f"base_model.model.{head}.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SettingError, match=rf"^critic\.model\.lora_adapter_path=.*{head}\.weight is missing"):
        check("critic.model")


def _resumes(folder, out):
    """A critic's checkpoint without the frozen weights has the head, and another run another drawn one."""
    worker = _worker(folder, 2, SETTINGS)
    lora_of(worker.engine.module).initialize(worker.engine.module, 0, stirred(worker.engine.module))
    worker.save_checkpoint(str(out), global_step=1)
    again = _worker(folder, 1, SETTINGS, seed=7)
    again.load_checkpoint(str(out))
    wanted = whole_tensors(adapters_of(worker.engine.module))
    for name, param in whole_tensors(adapters_of(again.engine.module)).items():
        assert torch.equal(param, wanted[name]), name
    assert any(name.startswith("score.") for name in wanted)


def test_critic_with_adapters_resumes_with_its_head(tmp_path):
    folder, out = save_qwen3_moe(tmp_path / "model"), tmp_path / "out"
    run_ranks(_resumes, WORLD, folder, out)
    export(out, tmp_path / "exported")
    head = load_file(out / "lora_adapter" / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert torch.equal(load_file(tmp_path / "exported" / "model.safetensors")["score.weight"], head)


SHARED = {"ulysses_sequence_parallel_size": 2}
FLOAT16 = {"mixed_precision": {"param_dtype": "fp16", "reduce_dtype": "fp32"}}


def test_critic_update_of_every_kind_has_the_gradients_of_the_plain_model(tmp_path):
    """Qwen3-MoE and Qwen3 have a token-classification class in transformers, GLM-4-MoE and Qwen3-VL-MoE have none.

    With adapters, these and the whole head are trained.
    """
    # Seed 0 draws a value so close to the loss's clipping that the plain model is off by 9 % in float16, too.
    own, other = save_qwen3_moe(tmp_path / "own", seed=1), save_glm4_moe(tmp_path / "other")
    dense, vision = save_qwen3(tmp_path / "dense"), save_vlm("qwen3_vl_moe", tmp_path / "vision")
    cases = [
        (own, True, PADDED, {}),
        (own, True, SETTINGS, {}),
        (own, True, {}, FLOAT16),
        (other, False, SETTINGS, {}),
        (other, False, {}, SHARED),
        (dense, True, {}, {"_of_a_role": True, "router_aux_loss_coef": 0.1}),
        (vision, False, {}, SHARED),
    ]
    run_ranks(each_case, WORLD, cases, _value_update)
