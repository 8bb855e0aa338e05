"""Record the collectives and the compute of a step, in order."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from epfsdp2.engine.fsdp import single_rank

__all__ = ["Recorder"]


class Recorder:
    """Collectives and compute of a rank in a step, in order, with the FQN of their module."""

    def __init__(self, model):
        self.events = []
        self.model = model
        for i, layer in enumerate(model.model.layers):
            if not hasattr(layer.mlp, "experts"):
                continue
            before, after = self._hooks(f"experts {i}")
            layer.mlp.experts.register_forward_pre_hook(before)
            layer.mlp.experts.register_forward_hook(after)

    def _hooks(self, name):
        def before(module, args):
            phase = "recompute" if torch._C._current_graph_task_id() != -1 else "forward"
            self.events.append((phase, name))

        def after(module, args, output):
            output.register_hook(lambda grad: self.events.append(("backward", name)))

        return before, after

    def __enter__(self):
        gather, reduce = _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce
        exchange, keep = dist.all_to_all_single, single_rank._keep_gradient

        def all_gather(params, *args, **kwargs):
            self.events.append(("gather", _module(params)))
            return gather(params, *args, **kwargs)

        def reduce_scatter(params, *args, **kwargs):
            self.events.append(("reduce", _module(params)))
            return reduce(params, *args, **kwargs)

        def keep_gradient(param, scale):
            event = ("reduce", _module([param]))  # in a group of one rank
            if hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None:
                self.events += [] if self.events[-1] == event else [event]
            return keep(param, scale)

        def all_to_all(output, *args, **kwargs):
            self.events.append(("all-to-all", output.dtype))
            return exchange(output, *args, **kwargs)

        self.patches = [
            patch.object(single_rank, "_keep_gradient", keep_gradient),
            patch.object(_fsdp_param_group, "foreach_all_gather", all_gather),
            patch.object(_fsdp_param_group, "foreach_reduce", reduce_scatter),
            patch.object(dist, "all_to_all_single", all_to_all),
        ]
        for p in self.patches:
            p.start()
        return self

    def __exit__(self, *exc):
        for p in self.patches:
            p.stop()


def _module(params):
    """Where a group's first parameter lives: ``layers.2`` for anything dense in it, else ``layers.2.experts``, ..."""
    name = params[0]._param_fqn.removeprefix("model.")
    if "experts" in name:
        return name.partition(".mlp")[0] + ".experts"
    return ".".join(name.split(".")[:2]) if name.startswith("layers") else name.split(".")[0]
