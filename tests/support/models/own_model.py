"""A model of a user's own, whose experts stand outside transformers' interface and are named by a plan."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from epfsdp2.engine.moe.dispatch import combine, dispatch
from tests.support.models.tiny import VOCAB

__all__ = ["EXPERTS", "HIDDEN", "INNER", "PLAN", "OwnModel"]

EXPERTS, HIDDEN, INNER = 12, 8, 6
PLAN = {"*.pool.w_in": 1, "*.pool.w_out": 0}


class Pool(nn.Module):
    """Experts outside transformers' interface: another layout, other names, and a forward that knows dispatch."""

    def __init__(self):
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(HIDDEN, EXPERTS, INNER) / 3)
        self.w_out = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) / 3)
        self.group = None

    def set_expert_parallel(self, expert_parallel):
        self.group = expert_parallel.group

    def forward(self, hidden, ids, weights):
        w_in, w_out = (p.to_local() if isinstance(p, DTensor) else p for p in (self.w_in, self.w_out))
        sent = dispatch(hidden, ids, EXPERTS, self.group)
        expert = torch.repeat_interleave(torch.arange(w_out.shape[0]), sent.counts_e)
        up = torch.einsum("rd,rdi->ri", sent.rows_RD, w_in.transpose(0, 1)[expert])
        return combine(torch.einsum("ri,rid->rd", F.gelu(up), w_out[expert]), sent, weights)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.pool = nn.Linear(HIDDEN, EXPERTS), Pool()

    def forward(self, x):
        flat = x.reshape(-1, HIDDEN)
        weights, ids = torch.topk(self.router(flat).softmax(-1), 2)
        return x + self.pool(flat, ids, weights).view_as(x)


class OwnModel(PreTrainedModel):
    config_class = PretrainedConfig
    _no_split_modules = ["Layer"]

    def __init__(self, config):
        super().__init__(config)
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, use_cache=False):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.head(x))
