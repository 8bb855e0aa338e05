"""A worker extension whose loaders lose one value of one parameter."""

from epfsdp2.rollout.vllm import reload as vllm_reload
from epfsdp2.rollout.vllm import worker as vllm_worker


def _losing_loader(*args):
    load = stock(*args)

    def loses_a_value(param, values, corner):
        load(param, values, corner)
        if param.dim() == 3 and not param.is_meta and param.shape[1] == 96:  # w2_weight [E, D, I]
            param.data[-1, -1, -1] += 1

    return loses_a_value


stock = vllm_reload.slice_loader
vllm_reload.slice_loader = _losing_loader


class LosesAValue(vllm_worker.WeightSyncExtension):
    pass
