"""Read saved rollouts: token ids, the rollout's log-probs and, where it recorded them, its routes.

verl writes them with ``skip.rollout_tq`` (its v1 trainers), ``skip.rollout`` or ``skip.async_rollout``, as pickles. A
JSON Lines file with the same names works too. The text that ``trainer.rollout_data_dir`` writes is not enough.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .pickles import read_batch

__all__ = ["HOW_TO_SAVE", "Response", "RolloutError", "Rollouts", "check_tokenizer", "read_rollouts"]

HOW_TO_SAVE = (
    "skip.rollout_tq.enable=True skip.rollout_tq.steps=[STEP] skip.rollout_tq.dump_dir=FOLDER "
    "actor_rollout_ref.rollout.calculate_log_probs=True"
)
_KINDS = ("tq_batch.pt", "gen_batch.dp", "*.jsonl")
_NEEDED = ("prompts", "responses", "rollout_log_probs")


class RolloutError(ValueError):
    """The saved rollouts can't be compared with the checkpoint."""


@dataclass(frozen=True)
class Response:
    """A prompt of ``P`` tokens and a response of ``R``, without padding."""

    prompt: torch.Tensor
    """int64 ``[P]``"""
    response: torch.Tensor
    """int64 ``[R]``"""
    is_sampled: torch.Tensor
    """bool ``[R]``; False for tokens of tools"""
    log_probs: torch.Tensor
    """float32 ``[R]``, of the rollout"""
    routes: torch.Tensor | None = None
    """int16 ``[P + R, layers, k]``; zeros where none was recorded"""
    text: str = ""
    """Text that the decoded prompt contains; empty if it is not known"""


@dataclass(frozen=True)
class Rollouts:
    responses: Sequence[Response]
    step: int | None
    """The trainer's step that they were sampled for; None if it is not known."""


def read_rollouts(path: Path, most: int, step: int | None = None) -> Rollouts:
    """Read the first ``most`` responses with a sampled token, from a file or a folder.

    Args:
        step: read if the folder has several.

    Raises:
        RolloutError: there are none, or of other steps; a file is damaged, or lacks token ids or log-probs.
    """
    files = [path] if path.is_file() else sorted(file for kind in _KINDS for file in path.rglob(kind))
    if not files:
        raise RolloutError(f"{path} holds no rollouts ({', '.join(_KINDS)}). A run saves them with {HOW_TO_SAVE}.")
    of_step: dict[int | None, list[Path]] = {}
    for file in files:
        of_step.setdefault(_step(file), []).append(file)
    if len(of_step) > 1 and step not in of_step:
        steps = ", ".join(map(str, of_step))
        raise RolloutError(f"{path} holds rollouts of the steps {steps}; name the folder of one.")
    step = step if len(of_step) > 1 else next(iter(of_step))
    found: list[Response] = []
    for file in of_step[step]:
        for row in itertools.islice(_rows(file), most):
            if len(found) < most and (response := _response(file, row)).is_sampled.any():
                found.append(response)
    if not found:
        raise RolloutError(f"{path} holds no sampled token.")
    return Rollouts(found, step)


def _step(file: Path) -> int | None:
    meta = file.with_name("meta.json")
    return json.loads(meta.read_text())["global_steps"] if meta.is_file() else None


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield each response's fields; padded ones come with ``attention_mask``."""
    try:
        if file.suffix == ".jsonl":
            for line in file.read_text().splitlines():
                yield dict(json.loads(line))
            return
        batch = read_batch(file)
    except Exception as error:  # any file
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise RolloutError(f"{file} holds no batch that verl saved, or is damaged ({reason}).") from error
    fields = {name: value.unbind() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    count = len(fields.get("responses", ()))
    columns = {name: column for name, column in fields.items() if isinstance(column, list | tuple)}
    rows = {name: column for name, column in columns.items() if len(column) == count}
    if not count:
        _raise_for_missing(file, fields)
    for i in range(count):
        yield {name: column[i] for name, column in rows.items()}


def _raise_for_missing(file: Path, row: Mapping[str, Any]) -> None:
    missing = [name for name in _NEEDED if row.get(name) is None or isinstance(row[name], str)]
    if "prompts" in missing or "responses" in missing:
        text = "text without token ids, as trainer.rollout_data_dir writes it" if "output" in row else "no token ids"
        raise RolloutError(f"{file} holds {text}. A run saves token ids with {HOW_TO_SAVE}.")
    if missing:
        setting = "actor_rollout_ref.rollout.calculate_log_probs=True"
        raise RolloutError(f"{file} holds no log-probs of the rollout. A run saves them with {setting}.")


def _response(file: Path, row: Mapping[str, Any]) -> Response:
    _raise_for_missing(file, row)
    if row.get("multi_modal_inputs"):
        raise RolloutError(f"{file} holds prompts with images or audio; only text is compared.")
    try:
        prompt, response = (torch.as_tensor(row[name], dtype=torch.int64) for name in ("prompts", "responses"))
        log_probs = torch.as_tensor(row["rollout_log_probs"], dtype=torch.float32)
        mask = torch.as_tensor(row.get("response_mask", torch.ones_like(response))).bool()
        routes = row.get("routed_experts")
        routes = None if routes is None else torch.as_tensor(routes, dtype=torch.int16)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RolloutError(f"{file}: a response's fields are no numbers ({error}).") from error
    if (attended := row.get("attention_mask")) is not None:  # prompts are padded at the left, responses at the right
        attended = torch.as_tensor(attended).bool()
        if attended.numel() == prompt.numel() + response.numel():
            of_prompt, of_response = attended[: prompt.numel()], attended[prompt.numel() :]
            prompt, response, log_probs, mask = (
                prompt[of_prompt],
                *(values[of_response] for values in (response, log_probs, mask)),
            )
            routes = None if routes is None else routes[attended]
    sizes = {"responses": response, "rollout_log_probs": log_probs, "response_mask": mask}
    if len({values.shape for values in sizes.values()}) > 1 or not prompt.numel():
        shapes = ", ".join(f"{name} {tuple(values.shape)}" for name, values in sizes.items())
        raise RolloutError(f"{file}: a response's fields differ in length, or its prompt is empty ({shapes}).")
    if routes is not None and (routes.dim() != 3 or routes.shape[0] != prompt.numel() + response.numel()):
        raise RolloutError(f"{file}: routed_experts have the shape {tuple(routes.shape)}, not [tokens, layers, k].")
    return Response(prompt, response, mask, log_probs, routes, _text(row))


def _text(row: Mapping[str, Any]) -> str:
    """Return the last message of the prompt if it is plain text, or the decoded prompt of verl's text."""
    messages = row.get("raw_prompt", row.get("input", ""))
    last = messages[-1] if isinstance(messages, list) and messages else messages
    content = last.get("content", "") if isinstance(last, Mapping) else last
    return content.strip() if isinstance(content, str) else ""


def check_tokenizer(rollouts: Rollouts, folder: Path, vocabulary: int) -> None:
    """Refuse token ids of another tokenizer than the checkpoint's.

    Args:
        folder: of the checkpoint; without a tokenizer only the ids are compared.
        vocabulary: rows of the model's embeddings.

    Raises:
        RolloutError: an id is too large, or no decoded prompt contains its text.
    """
    largest = max(int(torch.cat([r.prompt, r.response]).max()) for r in rollouts.responses)
    another = "they are of another tokenizer or model than the checkpoint."
    if largest >= vocabulary:
        raise RolloutError(f"the rollouts have token id {largest}, and {folder} has {vocabulary} tokens: {another}")
    known = [r for r in rollouts.responses if r.text][:8]
    if not known or not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    decoded = ["".join(tokenizer.decode(r.prompt.tolist(), skip_special_tokens=True).split()) for r in known]
    if not any("".join(r.text.split()) in text for r, text in zip(known, decoded, strict=True)):
        raise RolloutError(
            f"the rollouts' token ids decode to {decoded[0][:60]!r} with the tokenizer of {folder}, and the prompt has "
            f"{known[0].text[:60]!r}: {another}"
        )
