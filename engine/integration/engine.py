"""The engine behind verl's interface: actor, reference policy and SFT, and the base of the critic's.

verl's own code packs inputs and turns logits into log-probs and entropy (``FSDPEngineWithLMHead``). ``building.py``
builds the model, ``step_features.py`` has the optional parts of a step.
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from verl.utils.device import get_device_id, get_device_name, get_torch_device
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.fsdp.transformer_impl import EngineEvalModeCtx, EngineTrainModeCtx

from ...rollout import servers
from ..checkpoint.saves import CheckpointSaver
from ..config.settings import sharding_options
from ..fsdp.after_gather import reshard_all
from ..fsdp.single_rank import keeping_casts
from ..invariance import check_invariance
from ..moe.gemm.backends import ROWS
from ..planner.flops import count_flops
from ..topology.mesh import Topology, build_meshes, build_sequence_mesh
from . import shims
from .building import BuildsModel, print_lines
from .checkpoints import WritesCheckpoints
from .delta_shards import ExpertsSpec, experts_entry
from .step_features import StepFeature

__all__ = ["DEVICES", "EPFSDP2Engine"]

DEVICES = ["cuda", "npu", "cpu"]


class EPFSDP2Engine(BuildsModel, WritesCheckpoints):
    """EP + FSDP2 behind verl's engine interface (verl 0.9.1, ``workers/engine/base.py``).

    verl's worker (``workers/engine_workers.py``) and verl's base class call an engine in this order. Methods with an
    asterisk are overridden, below in the same order.

        __init__ *
            _init_device_mesh *
        initialize *
            _build_model_optimizer *
                _build_module *                              (building.py)
            to *
        train_mode *, eval_mode *                            parameters, and in training states, to the device
            train_batch *                                    in training, for each mini-batch
                optimizer_zero_grad
                forward_backward_batch *                     infer_batch calls it as well, without gradients
                    forward_step *                           for each micro-batch
                        prepare_model_inputs *
                        the model's forward                  (experts dispatch, compute and combine in it)
                        prepare_model_outputs *
                        the loss function
                    backward
                optimizer_step *
            lr_scheduler_step *
            disable_adapter *                                in evaluation, around infer_batch of the reference policy
        to *                                                 when the mode ends, where parameters are offloaded
        get_per_tensor_param *                               a weight sync
        get_per_tensor_param_shard *, _hf_delta_entry *      a weight sync by verl's ``delta_sharded`` backend
        save_checkpoint *, load_checkpoint *                 (checkpoints.py)
    """

    engine_config: Any  # ``config.EPFSDP2EngineConfig``, which imports this room to register its engines
    module: Any
    features: list[StepFeature]
    _veomni_handles_position_ids = True  # verl then leaves positions whole, as ``SequenceParallel`` needs them
    # verl passes cumulative lengths where the model's forward takes them; the families here read position ids.
    pass_packed_cu_seqlens = False

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        engine_config = self._agree(model_config, engine_config, optimizer_config, checkpoint_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        # float32 means "no autocast" in verl's forward. FSDP gathers parameters in their compute dtype. Autocast would
        # run modules in bfloat16 that a model computes in float32 on purpose, such as routers.
        self._autocast_dtype = torch.float32
        if engine_config.offload_policy:
            # FSDP moves parameters itself, so verl must not.
            self._is_offload_param = self._is_offload_optimizer = False
        count_flops(model_config.hf_config)  # verl asks next whether it can
        self._saves = CheckpointSaver(get_device_name(), self._save_hf_config)
        if not engine_config.forward_only:
            servers.install(engine_config.sync_timeout_seconds)
            shims.install()

    def _init_device_mesh(self) -> None:
        config, device, world = self.engine_config, get_device_name(), dist.get_world_size()
        self.meshes = build_meshes(device, Topology.arrange(world, config.ep_size, config.fsdp_size, config.etp_size))
        self.device_mesh = self.meshes.dense
        self.ulysses_sequence_parallel_size = sp = config.ulysses_sequence_parallel_size
        self.use_ulysses_sp = sp > 1
        mesh = build_sequence_mesh(device, world, sp) if sp > 1 else None
        self.ulysses_device_mesh = mesh
        self.ulysses_parallel_group = None if mesh is None else mesh.get_group("sp")

    def initialize(self) -> None:
        self._build_model_optimizer()
        self.to("cpu", model=self._is_offload_param, optimizer=self._is_offload_optimizer, grad=self._is_offload_param)

    def _build_model_optimizer(self) -> None:
        """Build on meta, shard, allocate, load this rank's shards; then build the optimizer and its schedule."""
        options = self._overlapped(sharding_options(self.engine_config, self.model_config))
        module, files = self._open()
        self._announce(module, options)
        self._shard_and_load(module, files, options)
        if options.batch_invariant:
            check_invariance(module, get_device_name(), self.ulysses_parallel_group)
        self._take_shards(module, options)
        self.module, self.features = module, self._features_of(module)
        self._prepare_saves(files.folder)
        self._build_training(module)
        self._watch_for_failures()

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        BaseEngine.to(self, device=device, model=model, optimizer=optimizer, grad=grad)
        if self.engine_config.offload_policy:
            return
        target = get_device_id() if device == get_device_name() else device
        if model:
            self.module.to(target)
        for state in self.optimizer.state.values() if optimizer and self.optimizer is not None else ():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = value.to(target, non_blocking=True)
        if device == "cpu":  # wait for copies to the host, then free the device memory for other processes
            get_torch_device().synchronize()
            get_torch_device().empty_cache()

    def train_mode(self, **kwargs):
        self._saves.trainer_goes_on()
        return TrainMode(self, **kwargs)

    def eval_mode(self, **kwargs):
        self._saves.trainer_goes_on()
        return EvalMode(self, **kwargs)

    def train_batch(self, data, loss_function):
        for feature in self.features:
            feature.begin_update()
        outputs = super().train_batch(data, loss_function)
        metrics = {name: value for feature in self.features for name, value in feature.metrics().items()}
        metrics |= self.clipped_step.metrics()
        if self.rollout_sync.last_report is not None:  # verl drops the metrics that a sync returns
            metrics |= self.rollout_sync.last_report.metrics()
        if self.is_mp_src_rank_with_outputs():
            # Lists, because verl joins the lists of ranks and mini-batches before it takes the mean.
            outputs["metrics"] |= {name: [value] for name, value in metrics.items()}
        return outputs

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        for feature in self.features:
            feature.begin_batch(data, forward_only)
        with keeping_casts(self.module) if self.engine_config.keep_casts else contextlib.nullcontext():
            return super().forward_backward_batch(data, loss_function, forward_only)

    def forward_step(self, micro_batch, loss_function, forward_only):
        for feature in self.features:
            loss_function = feature.wrap_loss(loss_function)
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        for feature in self.features:
            loss = feature.add_loss(loss)
        return loss, output

    def _get_packed_pad_size(self, packed_length: int) -> int:
        padding = super()._get_packed_pad_size(packed_length)
        if not self.engine_config.batch_invariant:
            return padding
        return padding + -(packed_length + padding) % (ROWS * self.ulysses_sequence_parallel_size)

    def prepare_model_inputs(self, micro_batch):
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        for feature in self.features:
            feature.prepare_inputs(inputs, micro_batch)
        return inputs, arguments

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        outputs = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        for feature in self.features:
            feature.prepare_outputs(outputs, micro_batch)
        return outputs

    def optimizer_step(self) -> float:
        """Clip and step; return the norm before clipping. A norm that is not finite skips the step on every rank."""
        return self.clipped_step(self.optimizer).item()

    def lr_scheduler_step(self):
        rate = super().lr_scheduler_step()
        if self._survivors is not None:
            self._survivors.updated()
        # verl kills its workers at the end of a run, so the last update is the last chance to print.
        is_last = self.lr_scheduler.last_epoch == self.optimizer_config.total_training_steps
        if is_last and self.run_plan is not None:
            print_lines(self.rank, self.run_plan.outcome())
        return rate

    def disable_adapter(self) -> contextlib.AbstractContextManager[None]:
        """Return a context without adapters: verl's reference policy where the actor has adapters."""
        return contextlib.nullcontext() if self._lora is None else self._lora.disabled()

    def get_per_tensor_param(self, layered_summon=False, base_sync_done=None, **kwargs):
        """Return the weights for the rollout; iterated, they are full tensors under vLLM's names, on every rank.

        They have the dtype of this engine's forward, because masters are cast before they are gathered. Adapters are
        merged. With ``lora.merge=False`` the rollout gets the weights once and then the adapters alone. A colocated
        rollout has ``base_sync_done`` for this; for another one the checkpoint engine reads ``peft_config``.
        """
        self._saves.trainer_goes_on()
        config = self.adapters_config
        if config is None or base_sync_done is None:
            return self.rollout_sync.weights(peft_config=config), None
        return self.rollout_sync.weights("alone" if base_sync_done else "left out"), config

    def get_per_tensor_param_shard(self, **kwargs):
        """Return ``(name, flat values, spec)`` of this rank's shards in bfloat16, for verl's ``delta_sharded``."""
        self._saves.trainer_goes_on()
        return self.shard_export.shards(), None

    def _hf_delta_entry(self, name, spec, place, lidx, lval):
        if isinstance(spec, ExpertsSpec):
            return experts_entry(spec, lidx, lval)
        return super()._hf_delta_entry(name, spec, place, lidx, lval)


class TrainMode(EngineTrainModeCtx):
    """verl's context of training, which leaves FSDP2 usable after an error."""

    def __exit__(self, exc_type, exc_value, traceback):
        _reset_after_error(self.engine.module, exc_type)
        super().__exit__(exc_type, exc_value, traceback)


class EvalMode(EngineEvalModeCtx):
    """verl's context of evaluation, which leaves FSDP2 usable after an error and parameters sharded."""

    def __exit__(self, exc_type, exc_value, traceback):
        _reset_after_error(self.engine.module, exc_type)
        # After a forward without a backward the root stays gathered, and without reshard_after_forward every layer.
        # But verl reshards only the root, if fsdp_size > 1, and the default is -1 (fsdp/transformer_impl.py:1114).
        reshard_all(self.engine.module)
        super().__exit__(exc_type, exc_value, traceback)


def _reset_after_error(module: Any, error: type[BaseException] | None) -> None:
    """Reset FSDP after an error inside forward or backward, which leaves its state undefined (torch 2.13)."""
    if error is None or not hasattr(module, "reset_iter_state"):
        return
    try:
        module.reset_iter_state()
    except AttributeError as missing:
        # Before the first forward FSDP's state is empty, and the user must see the error that ended the mode.
        if type(missing.obj).__name__ != "FSDPCommContext":
            raise
