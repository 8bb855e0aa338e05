"""One value update through verl's TrainingWorker on 2 ranks against the plain model in one process."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from epfsdp2.engine.config import EPFSDP2EngineConfig
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.lora.adapters import lora_of
from epfsdp2.engine.preflight.run import check_training
from epfsdp2.recipes.export import export
from tests.support.engine.lora import SETTINGS, adapters_of, stirred
from tests.support.engine.sharded import whole_tensor, whole_tensors
from tests.support.models.published import stored_values
from tests.support.models.tiny import save_glm4_moe, save_qwen3_moe
from tests.support.models.vlm import save_vlm
from tests.support.ranks import each_case, run_ranks
from tests.support.trainer.drawn_updates import check_draw
from tests.support.trainer.draws import Draw
from tests.support.trainer.ppo import PADDED, value_worker

WORLD = 2


def _keeps_its_head(folder):
    worker = value_worker(folder, 2)
    head = whole_tensor(worker.engine.module.get_parameter("lm_head.weight"))
    assert torch.equal(head, stored_values(folder)["lm_head.weight"])


def test_critic_of_a_trained_head_reads_it_also_without_a_class_in_transformers(tmp_path):
    folder = save_glm4_moe(tmp_path, one_file=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(1, tensors["lm_head.weight"].shape[1])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run_ranks(_keeps_its_head, WORLD, folder)


def _resumes(folder, out, head):
    """A critic's checkpoint without the frozen weights has the head, and another run another drawn one."""
    worker = value_worker(folder, 2, model=SETTINGS)
    lora_of(worker.engine.module).initialize(worker.engine.module, 0, stirred(worker.engine.module))
    worker.save_checkpoint(str(out), global_step=1)
    again = value_worker(folder, 1, model=SETTINGS, seed=7)
    again.load_checkpoint(str(out))
    wanted = whole_tensors(adapters_of(worker.engine.module))
    for name, param in whole_tensors(adapters_of(again.engine.module)).items():
        assert torch.equal(param, wanted[name]), name
    assert any(name.startswith(f"{head}.") for name in wanted)


@pytest.mark.parametrize(
    ("save", "head"), [(save_qwen3_moe, "score"), pytest.param(save_glm4_moe, "lm_head", marks=pytest.mark.long)]
)
def test_critic_with_adapters_resumes_exports_and_is_checked_with_its_head(tmp_path, save, head):
    folder, out = save(tmp_path / "model"), tmp_path / "out"
    run_ranks(_resumes, WORLD, folder, out, head)
    export(out, tmp_path / "exported")
    file = out / "lora_adapter" / "adapter_model.safetensors"
    tensors, exported = load_file(file), load_file(tmp_path / "exported" / "model.safetensors")
    trained = tensors.pop(f"base_model.model.{head}.weight")
    assert torch.equal(exported[f"{head}.weight"], trained)

    attention, adapter = {"attn_implementation": "sdpa"}, str(file.parent)
    model = {"path": str(folder), "override_config": attention, "lora_rank": 4, "lora_adapter_path": adapter}

    def check(setting):
        return check_training(EPFSDP2EngineConfig(ep_size=2), WORLD, model, device="cpu", setting=setting)

    assert check("critic.model") is not None
    # The actor has no such module, or one with as many outputs as it has tokens.
    with pytest.raises(SettingError, match=rf"^actor_rollout_ref\.model\..*{head}"):
        check("actor_rollout_ref.model")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SettingError, match=rf"^critic\.model\.lora_adapter_path=.*{head}\.weight is missing"):
        check("critic.model")


def _check(folder, model, engine):
    check_draw(Draw(0, "qwen3_moe", {"critic": True}, engine, model, {"eps": 1e-4}, {}, [{"ep": 2}]), folder, folder)


def test_critic_update_of_every_kind_has_the_gradients_of_the_plain_model(tmp_path):
    """Qwen3-MoE has a token-classification class in transformers, GLM-4-MoE and Qwen3-VL-MoE have none.

    With adapters, these and the whole head are trained.
    """
    own, other, vision = save_qwen3_moe(tmp_path / "own"), save_glm4_moe(tmp_path / "other"), tmp_path / "vision"
    shared = {"ulysses_sequence_parallel_size": 2}
    cases = [(own, PADDED, {}), (own, SETTINGS, {}), (other, SETTINGS, {}), (other, {}, shared)]
    run_ranks(each_case, WORLD, [*cases, (save_vlm("qwen3_vl_moe", vision), {}, shared)], _check)
