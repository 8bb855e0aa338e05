"""Rollouts as verl saves them, and those that can't be compared."""

import json
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from epfsdp2.recipes.mismatch.cli import main, parse
from epfsdp2.recipes.mismatch.rollouts import HOW_TO_SAVE, RolloutError, check_tokenizer, read_rollouts
from tests.support.models.tiny import VOCAB, save_qwen3

CONFIG = {
    "trainer": {"v1": {"trainer_mode": "sync", "sync": {}}, "experiment_name": "e", "project_name": "p"},
    "actor_rollout_ref": {"rollout": {"n": 1}},
    "data": {"train_batch_size": 2, "max_response_length": 4, "max_prompt_length": 4},
}
PROMPTS, RESPONSES = [[5, 6, 7], [8, 9]], [[10, 11], [12, 13, 14, 15]]
LOG_PROBS, MASKS = [[-0.5, -0.25], [-1.0, -2.0, -3.0, -4.0]], [[1, 1], [1, 0, 0, 1]]


def _nested(rows, dtype=None):
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def _skip(kind, folder):
    from verl.utils.skip.rollout_skip import RolloutSkip, RolloutTqSkip

    cls = {"rollout_tq": RolloutTqSkip, "rollout": RolloutSkip}[kind]
    return cls(SimpleNamespace(action="cache", enable=True, dump_dir=str(folder), steps=[12]), OmegaConf.create(CONFIG))


def _saved_by_v1(folder, monkeypatch, **left_out):
    """Save a batch with verl's ``skip.rollout_tq``, as its v1 trainers do."""
    import transfer_queue
    from verl.utils.tensordict_utils import get_tensordict

    messages = [[{"role": "user", "content": " ".join(f"t{i}" for i in ids)}] for ids in PROMPTS]
    fields = {
        "prompts": _nested(PROMPTS),
        "responses": _nested(RESPONSES),
        "response_mask": _nested(MASKS),
        "rollout_log_probs": _nested(LOG_PROBS, torch.float32),
        "routed_experts": _nested([np.ones((n, 3, 2)).tolist() for n in (5, 6)], torch.int16),
        "raw_prompt": messages,
    }
    batch = get_tensordict({name: value for name, value in fields.items() if name not in left_out})
    monkeypatch.setattr(transfer_queue, "kv_batch_get", lambda **_: batch)
    sample = SimpleNamespace(keys=["a_0_0", "b_0_0"], partition_id="train", tags=[{}, {}])
    _skip("rollout_tq", folder).prepare_data(12, sample, 12)
    return folder


def _padded(folder, monkeypatch):
    """Save a batch with verl's ``skip.rollout``: prompts padded at the left, responses at the right."""
    from verl.protocol import DataProto

    def pad(rows, width, left):
        filled = [[0] * (width - len(row)) for row in rows]
        return torch.tensor([zeros + row if left else row + zeros for row, zeros in zip(rows, filled, strict=True)])

    fields = {"prompts": pad(PROMPTS, 4, True), "responses": pad(RESPONSES, 4, False)}
    fields |= {"response_mask": pad(MASKS, 4, False), "rollout_log_probs": pad(LOG_PROBS, 4, False).float()}
    ones = [[1] * len(row) for row in PROMPTS], [[1] * len(row) for row in RESPONSES]
    fields["attention_mask"] = torch.cat([pad(ones[0], 4, True), pad(ones[1], 4, False)], 1)
    fields["routed_experts"] = fields["attention_mask"][..., None, None].expand(-1, -1, 3, 2).to(torch.int16)
    messages = np.empty(2, dtype=object)
    messages[:] = [[{"role": "user", "content": "t5 t6 t7"}], [{"role": "user", "content": "t8 t9"}]]
    batch = DataProto.from_dict(tensors=fields, non_tensors={"raw_prompt": messages}, meta_info={"timing": {"s": 1.0}})
    _skip("rollout", folder).prepare_data(12, batch)
    return folder


@pytest.mark.parametrize("save", [_saved_by_v1, _padded])
def test_rollouts_that_verl_saves_have_tokens_log_probs_routes_text_and_step(tmp_path, monkeypatch, save):
    found = read_rollouts(save(tmp_path, monkeypatch), 8)
    assert found.step == 12 and len(found.responses) == 2
    for r, prompt, response, log_probs, mask in zip(found.responses, PROMPTS, RESPONSES, LOG_PROBS, MASKS, strict=True):
        assert (r.prompt.tolist(), r.response.tolist(), r.log_probs.tolist()) == (prompt, response, log_probs)
        assert r.is_sampled.tolist() == [bool(m) for m in mask]
        assert r.routes.shape == (len(prompt) + len(response), 3, 2) and (r.routes == 1).all()
        assert r.text == " ".join(f"t{i}" for i in prompt)
    assert len(read_rollouts(tmp_path, 1).responses) == 1


@pytest.mark.parametrize("field", ["responses", "rollout_log_probs"])
def test_rollouts_without_tokens_or_log_probs_are_refused_with_the_setting(tmp_path, monkeypatch, field):
    _saved_by_v1(tmp_path, monkeypatch, **{field: True})
    with pytest.raises(RolloutError, match=r"calculate_log_probs=True"):
        read_rollouts(tmp_path, 8)


def test_text_of_verls_rollout_data_dir_is_refused_with_the_setting_that_saves_tokens(tmp_path, capsys):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    RayPPOTrainer._write_generations(["a"], ["b"], ["c"], [1.0], {}, str(tmp_path), 3)
    assert main([str(tmp_path), str(tmp_path / "3.jsonl"), "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "text without token ids, as trainer.rollout_data_dir writes it" in said and HOW_TO_SAVE in said


class _Harmful:
    def __reduce__(self):
        return os.system, (f'{sys.executable} -c \'open("harm", "w")\'',)


@pytest.mark.parametrize("name", ["tq_batch.pt", "gen_batch.dp"])
def test_rollouts_that_would_run_code_do_not(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write = {"tq_batch.pt": torch.save, "gen_batch.dp": lambda value, path: path.write_bytes(pickle.dumps(value))}
    write[name]({"tensordict": {"responses": _Harmful()}}, tmp_path / name)
    with pytest.raises(RolloutError, match="no batch that verl saved"):
        read_rollouts(tmp_path, 8)
    assert not Path("harm").exists()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rollout_log_probs": [-1.0]}, "fields differ in length"),
        ({"routed_experts": [[[0, 1]]]}, r"not \[tokens, layers, k\]"),
        ({"response_mask": [0, 0]}, "no sampled token"),
        ({"prompts": []}, "its prompt is empty"),
        ({"prompts": "a b"}, "holds no token ids"),
        ({"rollout_log_probs": [None, -1.0]}, "fields are no numbers"),
        ({"multi_modal_inputs": {"pixel_values": [0.5]}}, "images or audio; only text is compared"),
    ],
)
def test_rollouts_whose_fields_do_not_fit_are_refused(tmp_path, change, match):
    row = {"prompts": PROMPTS[0], "responses": RESPONSES[0], "rollout_log_probs": LOG_PROBS[0], **change}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(RolloutError, match=match):
        read_rollouts(tmp_path, 8)


def test_rollouts_of_several_steps_a_damaged_file_and_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(RolloutError, match="holds no rollouts.*skip.rollout_tq.enable=True"):
        read_rollouts(tmp_path, 8)
    for step in (1, 2):
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "meta.json").write_text(json.dumps({"global_steps": step}))
        (tmp_path / str(step) / "tq_batch.pt").write_bytes(b"torn")
    with pytest.raises(RolloutError, match="rollouts of the steps 1, 2; name the folder of one"):
        read_rollouts(tmp_path, 8, 3)
    with pytest.raises(RolloutError, match="1/tq_batch.pt holds no batch that verl saved, or is damaged"):
        read_rollouts(tmp_path / "1", 8)
    with pytest.raises(RolloutError, match="2/tq_batch.pt holds no batch"):
        read_rollouts(tmp_path, 8, 2)


def test_rollouts_of_another_tokenizer_are_refused(tmp_path, monkeypatch):
    folder = save_qwen3(tmp_path / "model")
    found = read_rollouts(_saved_by_v1(tmp_path / "rollouts", monkeypatch), 8)
    check_tokenizer(found, folder, VOCAB)
    with pytest.raises(RolloutError, match="token id 15, and .* has 12 tokens: they are of another tokenizer"):
        check_tokenizer(found, folder, 12)
    file = folder / "tokenizer.json"
    words = json.loads(file.read_text())
    words["model"]["vocab"] = {word: (i + 40) % 92 for word, i in words["model"]["vocab"].items()}
    file.write_text(json.dumps(words))
    with pytest.raises(RolloutError, match="decode to '.*' with the tokenizer of .* and the prompt has 't5 t6 t7'"):
        check_tokenizer(found, folder, VOCAB)


def test_config_of_a_run_sets_the_options(tmp_path):
    rollout = {"name": "sglang", "temperature": 0.7, "top_p": 0.9, "top_k": -1}
    engine = {"strategy": "epfsdp2", "dtype": "bf16", "fp32_modules": ["lm_head", "*.mlp.gate"], "ep_size": 4}
    config = {"actor_rollout_ref": {"rollout": rollout, "model": {"use_remove_padding": False}}}
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create({**config, "engine": engine})))
    found = parse(["a", "b", "--run", str(tmp_path / "config.yaml"), "--temperature", "1.0"])
    assert (found.dtype, found.head_dtype, found.router_dtype) == ("bfloat16", "float32", "float32")
    assert (found.rollout, found.rows, found.ep, found.temperature) == ("sglang", "padded", 4, 1.0)
    assert found.sampled == {"temperature": [0.7], "top_p": [0.9], "top_k": [-1.0]}
    (tmp_path / "config.yaml").write_text("actor_rollout_ref: {actor: {fsdp_config: {dtype: float16}}}")
    assert parse(["a", "b", "--run", str(tmp_path / "config.yaml")]).dtype == "float16"


def test_help_and_wrong_options_say_what_works(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"])
    said = capsys.readouterr().out
    assert "--previous" in said and "skip.rollout_tq.enable=True" in said
    with pytest.raises(SystemExit, match="2"):
        parse(["a", "b", "--sampling", "min_p=0.1"])
    assert "sets none of temperature, top_p" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        parse(["a", "b", "--tokens", "0"])
    assert "--tokens is 0; it has to be positive" in capsys.readouterr().err
