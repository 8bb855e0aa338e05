"""The sync planner's command line, on published sizes."""

import pytest
from transformers import MiniMaxConfig, Qwen3Config, Qwen3MoeConfig

from epfsdp2.recipes.plan_sync import main


@pytest.fixture(scope="module")
def qwen3_30b(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3-30b")
    Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    return str(folder)


def _rows(text):
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in cells}


def test_plan_sync_prints_the_bytes_of_each_mode(qwen3_30b, capsys):
    assert main(["--model", qwen3_30b, "--world", "16", "--ep", "8", "--rollout-tp", "8", "--rollout-ep"]) == 0
    text = capsys.readouterr().out
    rows = _rows(text)
    assert "61.06 GB in bf16, 531 tensors; trainer 1 x 2 x 8" in text
    assert rows["full"][:4] == ["61.06", "3.82", "57.25", "30.53"]
    assert rows.keys() == {"full", "sliced"}
    assert rows["sliced"][:4] == ["7.68", "3.77", "4.05", "3.99"]
    assert rows["sliced"][5] == "435" and rows["sliced"][7] == "0.09"
    assert "full is bound by Python on the hosts: 0.68 s of wire" in text


@pytest.mark.parametrize(("dtype", "scales"), [("fp8", "0.007"), ("int8-rows", "0.089")])
def test_plan_sync_of_a_quantised_rollout_has_half_the_bytes(qwen3_30b, capsys, dtype, scales):
    sizes = ["--model", qwen3_30b, "--world", "16", "--ep", "8", "--rollout-tp", "8", "--rollout-ep"]
    assert main([*sizes, "--dtype", dtype]) == 0
    text = capsys.readouterr().out
    rows = _rows(text)
    assert f"31.17 GB in {dtype}" in text and f"Besides, {scales} GB of scales are reduced" in text
    assert list(rows) == ["sliced"]
    assert 0.5 < float(rows["sliced"][0]) / 7.68 < 0.52, "embeddings and norms stay in bfloat16"


def test_plan_sync_of_a_family_with_stacks_alone_sends_slices_and_no_own_experts(capsys):
    assert main(["--model", "gpt-oss-20b", "--world", "64", "--ep", "32", "--rollout-tp", "8", "--rollout-ep"]) == 0
    rows = _rows(capsys.readouterr().out)
    assert rows.keys() == {"full", "sliced"}
    assert rows["sliced"][:3] == ["5.23", "0.65", "5.23"]


def test_plan_sync_of_a_standalone_rollout_has_nothing_of_its_own(qwen3_30b, capsys):
    assert main(["--model", qwen3_30b, "--world", "16", "--ep", "8", "--rollout-tp", "4", "--standalone", "8"]) == 0
    assert _rows(capsys.readouterr().out)["sliced"][:4] == ["15.29", "0.00", "15.29", "15.29"]


@pytest.mark.long
def test_plan_sync_of_kimi_k2_on_1024_ranks_says_what_bounds_it(capsys):
    assert main(["--model", "Kimi-K2", "--world", "1024", "--ep", "64", "--rollout-tp", "16"]) == 0
    text = capsys.readouterr().out
    assert _rows(text)["sliced"][:6] == ["130.34", "0.72", "130.30", "130.01", "365", "1093"]
    assert "sliced is bound by the network: 2.89 s of wire" in text


def test_plan_sync_of_an_unknown_layout_has_mode_full_alone(tmp_path, capsys):
    MiniMaxConfig(num_hidden_layers=4).save_pretrained(tmp_path)
    assert main(["--model", str(tmp_path), "--world", "8", "--ep", "8"]) == 0
    text = capsys.readouterr().out
    assert "How vLLM cuts a minimax is not known" in text
    assert set(_rows(text)) == {"full"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--world", "16", "--ep", "3"], "engine.ep_size"),
        (["--world", "96", "--ep", "96"], "one of [1, 2, 4, 8, 16, 32]"),
        (["--world", "16", "--ep", "8", "--rollout-tp", "16", "--sync-megabytes", "4", "--dtype", "fp32"], "fp32"),
    ],
)
def test_plan_sync_of_impossible_sizes_says_why(qwen3_30b, capsys, options, words):
    main(["--model", qwen3_30b, *options])
    assert words in capsys.readouterr().out


def test_plan_sync_of_a_dense_model_has_no_expert_parallelism(tmp_path, capsys):
    Qwen3Config(num_hidden_layers=2).save_pretrained(tmp_path)
    assert main(["--model", str(tmp_path), "--world", "8", "--rollout-tp", "2"]) == 0
    assert "sliced" in capsys.readouterr().out
    assert main(["--model", str(tmp_path), "--world", "8", "--ep", "8"]) == 1
    assert f"engine.ep_size=8: {tmp_path} has no experts to split." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rollout-tp", "3"], "--world is 8, which a replica"),
        (["--standalone", "3", "--rollout-tp", "2"], "--standalone is 3, which a replica"),
    ],
)
def test_plan_sync_of_workers_that_no_sync_serves_is_refused(qwen3_30b, capsys, options, words):
    with pytest.raises(SystemExit):
        main(["--model", qwen3_30b, "--world", "8", *options])
    assert words in capsys.readouterr().err
