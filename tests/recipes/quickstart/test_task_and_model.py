"""The quickstart's task, tokenizer and model."""

import pandas as pd
import pytest
import torch
from safetensors import safe_open

from epfsdp2.recipes.quickstart import commands, model, task
from tests.support.trainer.quickstart import command_values


def test_reward_of_any_answer_is_exact():
    score = lambda answer: task.compute_score(task.DATA_SOURCE, answer, "12", {"index": 0})  # noqa: E731
    assert score("12") == 1.0
    assert [score(wrong) for wrong in ("", "1", "2", "012", "12 ", "123", "13")] == [0.0] * 7


def test_reward_of_other_data_is_refused():
    with pytest.raises(ValueError, match="gsm8k"):
        task.compute_score("openai/gsm8k", "12", "12")


def test_task_problems_have_right_answers():
    assert len(set(task.problems())) == 100
    assert all(eval(question.rstrip("=")) == int(answer) for question, answer in task.problems())


def test_task_labels_are_as_noisy_as_asked_and_right_answers_win():
    answers = dict(task.problems())
    rows = task.warmup_rows(seed=3, copies=200, right_share=0.4)
    told = pd.DataFrame([(m[0]["content"], m[1]["content"]) for m in (row["messages"] for row in rows)])
    assert (told[0].map(answers) == told[1]).mean() == pytest.approx(0.4, abs=0.02)
    for question, labels in told.groupby(0)[1]:
        counts = labels.value_counts()
        assert counts.index[0] == answers[question]
        assert counts.iloc[1] < counts.iloc[0] / 2


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_task_with_a_share_of_right_labels_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match="right_share"):
        task.warmup_rows(1, 1, share)


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


def test_tokenizer_of_any_text_decodes_what_it_encoded(saved_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    for question, answer in task.problems():
        ids = tokenizer(question + answer)["input_ids"]
        assert len(ids) == len(question + answer)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == question + answer
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == question + answer


def test_chat_template_is_the_sum_of_its_turns(saved_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    turns = task.warmup_rows(1, 1, 0.5)[0]["messages"]
    apply = lambda messages, **kw: tokenizer.apply_chat_template(messages, return_dict=False, **kw)  # noqa: E731
    assert apply(turns) == apply(turns[:1]) + apply(turns[1:])
    prompt = apply(turns[:1], add_generation_prompt=True)
    assert prompt == apply(turns)[: len(prompt)]
    assert apply(turns)[-1] == tokenizer.eos_token_id


def test_model_vocabulary_is_exactly_the_tokenizers(saved_model):
    """vLLM masks logits beyond the tokenizer; one row too many would be a constant log-prob difference."""
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(saved_model), AutoTokenizer.from_pretrained(saved_model)
    assert config.vocab_size == len(tokenizer)
    with safe_open(saved_model / "model.safetensors", "pt") as file:
        assert file.get_tensor("lm_head.weight").shape[0] == len(tokenizer)


def test_model_checkpoint_has_the_original_names_and_useful_shapes(saved_model):
    with safe_open(saved_model / "model.safetensors", "pt") as file:
        names = set(file.keys())
        gate = file.get_tensor("model.layers.1.mlp.experts.15.gate_proj.weight")
    assert not any("gate_up_proj" in name for name in names)
    assert gate.dtype == torch.float32
    inner, hidden = gate.shape
    assert hidden != inner and hidden != 2 * inner
    assert hidden % 32 == inner % 32 == 0


def test_model_depends_on_the_seed_alone_and_leaves_torch_alone():
    tokenizer = model.build_tokenizer()
    before = torch.get_rng_state()
    a, b, c = (model.build_model(tokenizer, seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())


def test_quickstart_bucket_holds_every_expert_tensor_and_not_the_model(tmp_path):
    experts = model.build_model(model.build_tokenizer(), 1)
    bucket = next(o for o in commands.overrides("grpo", command_values(tmp_path)) if "bucket_megabytes" in o)
    size = int(bucket.split("=")[1]) << 20
    bytes_of = [p.numel() * p.element_size() for p in experts.parameters()]
    assert max(bytes_of) < size
    assert sum(bytes_of) > 2 * size
