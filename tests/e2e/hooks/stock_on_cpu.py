"""What verl's own engine lacks on a CPU: tensors that SGLang can take, and a critic without flash attention."""

import functools

from transformers import AutoModelForTokenClassification

from epfsdp2.rollout.sglang import cpu_shim

cpu_shim.install()
_stock = AutoModelForTokenClassification.from_pretrained


@functools.wraps(_stock)
def _from_pretrained(*args, **kwargs):
    return _stock(*args, **{**kwargs, "attn_implementation": "sdpa"})


AutoModelForTokenClassification.from_pretrained = _from_pretrained
