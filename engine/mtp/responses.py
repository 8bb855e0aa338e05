"""Find the positions whose drafts are response tokens."""

import torch
from tensordict import TensorDict

__all__ = ["drafted"]


def drafted(data: TensorDict, depth: int) -> list[torch.Tensor]:
    """Return for each of ``depth`` layers whether its draft from a position is a response token: bool ``[tokens]``.

    Positions are those of the packed row. The draft of the first layer from token ``t`` is token ``t + 2``.
    """
    is_response, tokens_left = _responses(data)
    return [is_response.roll(-ahead) & (tokens_left > ahead) for ahead in range(2, 2 + depth)]


def _responses(data: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether a token of the packed row is trained on, and the tokens of its sequence from itself on."""
    ids, mask = data["input_ids"], data["loss_mask"] if "loss_mask" in data else data["response_mask"]
    lengths, tokens = ids.offsets().diff(), ids.values().shape[0]
    ends = torch.repeat_interleave(ids.offsets()[1:], lengths, output_size=tokens)
    rows = torch.arange(tokens, device=ends.device)
    if mask.is_nested and mask.values().shape[0] == tokens:  # sft_trainer's, of whole sequences
        return mask.values().bool(), ends - rows
    if data["prompts"].is_nested:
        responses = data["responses"].offsets().diff()
    else:
        responses = data["attention_mask"][:, data["prompts"].shape[1] :].sum(dim=1)
    padded = mask.to_padded_tensor(0) if mask.is_nested else mask
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=ends.device), lengths, output_size=tokens)
    column = rows - ends + responses[sequence]  # in the response; negative in the prompt
    return (column >= 0) & padded[sequence, column.clamp(min=0)].bool(), ends - rows
