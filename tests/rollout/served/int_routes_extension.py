"""A worker extension for PhiMoE, whose 64-bit routes vLLM's CPU kernel refuses."""

from vllm.model_executor.models import phimoe

from tests.support.rollout.vllm_extension import ReadableWorker

_route = phimoe.phimoe_routing_function


def _int_routes(*args, **kwargs):
    weights, ids = _route(*args, **kwargs)
    return weights, ids.int()


phimoe.phimoe_routing_function = _int_routes


class IntRoutes(ReadableWorker):
    pass
