"""A worker extension whose loader loses one value of one parameter."""

from epfsdp2.rollout.vllm import reload as vllm_reload
from epfsdp2.rollout.vllm import worker as vllm_worker


def _loses_a_value(record):
    for memory in record.units.values():
        if memory.shape == (96,):  # a norm, which vLLM's CPU build does not pack
            memory[-1] += 1
    stock(record)


stock = vllm_reload._process
vllm_reload._process = _loses_a_value


class LosesAValue(vllm_worker.WeightSyncExtension):
    pass
