"""The quickstart's task, tokenizer and model."""

import pandas as pd
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from epfsdp2.recipes.quickstart import commands, model, task
from tests.support.trainer.quickstart import command_values


def test_reward_is_exact():
    answers = ("12", "", "1", "2", "012", "12 ", "123", "13")
    assert [task.compute_score("sums", answer, "12", {"index": 0}) for answer in answers] == [1.0] + [0.0] * 7


def test_task_labels_are_as_noisy_as_asked_and_right_answers_win():
    answers = dict(task.PROBLEMS)
    assert len(answers) == 100 and all(
        eval(question.rstrip("=")) == int(answer) for question, answer in answers.items()
    )
    rows = task.warmup_rows(seed=3, copies=200, right_share=0.4)
    told = pd.DataFrame([(m[0]["content"], m[1]["content"]) for m in (row["messages"] for row in rows)])
    assert (told[0].map(answers) == told[1]).mean() == pytest.approx(0.4, abs=0.02)
    for question, labels in told.groupby(0)[1]:
        counts = labels.value_counts()
        assert counts.index[0] == answers[question]
        assert counts.iloc[1] < counts.iloc[0] / 2


def test_task_datasets_depend_on_the_seed_alone(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        task.write_datasets(tmp_path / name, seed, copies=2, right_share=0.5)
    for file in ("warmup.parquet", "grpo.parquet"):
        a, b, c = (pd.read_parquet(tmp_path / name / file).to_json() for name in "abc")
        assert a == b
        assert a != c


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.write_model(folder, seed=1)
    return folder


def test_tokenizer_decodes_what_it_encoded_and_a_chat_is_the_sum_of_its_turns(saved_model):
    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    for question, answer in task.PROBLEMS:
        ids = tokenizer(question + answer)["input_ids"]
        assert len(ids) == len(question + answer)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == question + answer
    turns = task.warmup_rows(1, 1, 0.5)[0]["messages"]
    apply = lambda messages, **kw: tokenizer.apply_chat_template(messages, return_dict=False, **kw)  # noqa: E731
    assert apply(turns) == apply(turns[:1]) + apply(turns[1:])
    prompt = apply(turns[:1], add_generation_prompt=True)
    assert prompt == apply(turns)[: len(prompt)]
    assert apply(turns)[-1] == tokenizer.eos_token_id


def test_model_checkpoint_has_published_names_useful_shapes_and_exactly_the_tokenizers_vocabulary(saved_model):
    """vLLM masks logits beyond the tokenizer; one row too many would be a constant log-prob difference."""
    config, tokenizer = AutoConfig.from_pretrained(saved_model), AutoTokenizer.from_pretrained(saved_model)
    with safe_open(saved_model / "model.safetensors", "pt") as file:
        names = set(file.keys())
        gate = file.get_tensor("model.layers.1.mlp.experts.15.gate_proj.weight")
        rows = file.get_tensor("lm_head.weight").shape[0]
    assert config.vocab_size == rows == len(tokenizer)
    assert not any("gate_up_proj" in name for name in names)
    assert gate.dtype == torch.float32
    inner, hidden = gate.shape
    assert hidden not in (inner, 2 * inner) and hidden % 32 == inner % 32 == 0


def test_model_depends_on_the_seed_alone_and_buckets_hold_every_tensor_but_not_all(tmp_path):
    tokenizer = model.build_tokenizer()
    before = torch.get_rng_state()
    a, b, c = (model.build_model(tokenizer, seed) for seed in (1, 1, 2))
    assert torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert torch.equal(before, torch.get_rng_state())
    bucket = next(o for o in commands.overrides("grpo", command_values(tmp_path)) if "bucket_megabytes" in o)
    bytes_of = [p.numel() * p.element_size() for p in a.parameters()]
    assert max(bytes_of) < int(bucket.split("=")[1]) << 20 < sum(bytes_of) / 2
