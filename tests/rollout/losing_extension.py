"""A worker extension whose loaders lose one value of one parameter."""

from epfsdp2.rollout import vllm_worker


def _loses_a_value(param, values, corner):
    vllm_worker_load(param, values, corner)
    if param.dim() == 3 and not param.is_meta and param.shape[1] == 96:  # w2_weight [E, D, I]
        param.data[-1, -1, -1] += 1


vllm_worker_load = vllm_worker._load_slice
vllm_worker._load_slice = _loses_a_value


class LosesAValue(vllm_worker.WeightSyncExtension):
    pass
