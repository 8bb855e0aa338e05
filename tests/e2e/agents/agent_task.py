"""A task for an agent with a tool, made offline: numbers stand in a table that only the tool can read.

The right answer to ``37=`` is the last two digits of the tool's answer for ``37``. A call has one token before its
key and one behind it, so that a tiny model can write calls for verl's Hermes parser. Every eighth answer of the tool is
so long that the policy's answer is cut off at ``RESPONSE`` tokens, after its first digit. verl loads this file for the
tool (``function_tool_path``), and for the reward.
"""

import random
from pathlib import Path

import pandas as pd
import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from verl.tools.function_tool import function_tool

from epfsdp2.recipes.quickstart.model import build_model, build_tokenizer

__all__ = ["PROMPT", "RESPONSE", "TABLE", "compute_score", "look_up", "write_task"]

SOURCE = "epfsdp2/agent"
# Tokens of a question, and of a call, the tool's turn and an answer: 5 + 7 + 3; a long answer of the tool has 7 more.
PROMPT, RESPONSE, _FILLING = 8, 20, "." * 7
_CALL, _CLOSE = '<tool_call>{"name": "look_up", "arguments": {"key": "', '"}}</tool_call>'
_END, _TOOL = "<|im_end|>", "<|tool|>"
# The share of supervised conversations that call the tool, and the share of these that repeat its digits.
_CALLS, _REPEATS = 0.5, 0.7
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _digits(rng: random.Random) -> str:
    return f"{rng.randrange(100):02}"


_rng = random.Random(1)
TABLE = {f"{key:02}": (_FILLING if key % 8 == 7 else "") + _digits(_rng) for key in range(100)}


@function_tool
def look_up(key: str) -> str:
    """Look a number up.

    Args:
        key: two digits.
    """
    return TABLE.get(key, "?")


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_settings) -> float:
    """The share of the two digits that the last turn gives, the first one first; nothing for more than two tokens."""
    assert data_source == SOURCE
    answer = solution_str.split("\n")[-1].removesuffix(_END)
    if len(answer) > 2 or answer[:1] != ground_truth[0]:
        return 0.0
    return 1.0 if answer == ground_truth else 0.5


def write_task(folder: Path, steps: int) -> tuple[Path, Path]:
    """Write questions, and a model that calls the tool and repeats its answer about every second time.

    Return the model's folder, and the file of the questions.
    """
    tokenizer = _tokenizer()
    model = build_model(tokenizer, seed=1)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    _warm_up(model, tokenizer, steps)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {
            "data_source": SOURCE,
            "agent_name": "tool_agent",
            "prompt": [{"role": "user", "content": f"{key}="}],
            "reward_model": {"style": "rule", "ground_truth": answer[-2:]},
            "extra_info": {"index": int(key)},
        }
        for key, answer in TABLE.items()
    ]
    random.Random(2).shuffle(rows)
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    return folder / "model", folder / "train.parquet"


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"eos_token": _END})
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in (_CALL, _CLOSE, _TOOL, "\n")])
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _conversation(rng: random.Random) -> list[dict[str, str]]:
    """A random question, with a table of its own."""
    key, digits = _digits(rng), _digits(rng)
    messages = [{"role": "user", "content": f"{key}="}]
    if rng.random() < _CALLS:
        filling = rng.choice(("", "", _FILLING))
        messages.append({"role": "assistant", "content": f"{_CALL}{key}{_CLOSE}"})
        messages.append({"role": "tool", "content": f"{filling}{digits}"})
    answer = digits if rng.random() < _REPEATS else _digits(rng)
    return [*messages, {"role": "assistant", "content": answer}]


def _warm_up(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    rng, optimizer = random.Random(3), torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        texts = [tokenizer.apply_chat_template(_conversation(rng), tokenize=False) for _ in range(64)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
        ids = batch["input_ids"]
        labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
        loss = model(input_ids=ids, attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
