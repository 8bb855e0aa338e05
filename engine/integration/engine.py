"""The engine as verl sees it: actor, reference policy and SFT.

Thin on purpose. Preparing packed inputs and turning logits into log-probs and entropy is verl's own code
(``FSDPEngineWithLMHead``); everything about sharding is in the rooms beside this file.
"""

import contextlib
import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tensordict import TensorDict
from torch import nn
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.device import get_device_id, get_device_name, get_torch_device
from verl.utils.model import get_hf_auto_model_class
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from ...rollout import server_adapter
from ...rollout.remote.delta_shards import ExpertsSpec, ShardExport, experts_entry
from ...rollout.sync import RolloutSync, SyncSettings
from ..build import shard_and_load
from ..checkpoint.safetensors_reader import local_checkpoint, open_checkpoint
from ..checkpoint.saves import CheckpointSaver
from ..fsdp.options import ShardingOptions
from ..fsdp.ulysses import SequenceParallel, own_part
from ..fsdp.wrap_plan import compute_dtypes
from ..lora.adapters import Lora
from ..lora.peft_files import read_adapter
from ..lora.settings import LoraSettings
from ..model.layers import layer_names
from ..model.meta import build_on_meta, check_not_quantised
from ..model.vision import VisionTowerSync, preserve_forward
from ..moe.find import find_experts, is_dense
from ..moe.gemm.backends import choose_backend
from ..moe.router.losses import RouterLosses
from ..optim.clip import ClippedStep
from ..optim.lr_scheduler import build_multi_lr_scheduler
from ..optim.multi_optimizer import optimizer_from_config
from ..planner.run import StepEstimate, estimate_step
from ..planner.text import format_mesh
from ..preflight.dense_models import check_alone, not_applied, without_experts
from ..preflight.run import check_training
from ..topology.dtensor import is_adapter
from ..topology.mesh import Topology, build_meshes, build_sequence_mesh
from ..topology.rank_consistency import check_agreement, model_facts, raise_on_all_ranks, without_paths
from .checkpoints import WritesCheckpoints
from .modes import EvalMode, TrainMode
from .sharding import sharding_options
from .shims import distillation_shim, separation_shim

__all__ = ["DEVICES", "EPFSDP2Engine"]

DEVICES = ["cuda", "npu", "cpu"]


class EPFSDP2Engine(WritesCheckpoints, FSDPEngineWithLMHead):
    """EP + FSDP2 behind verl's engine interface (verl 0.9.1, ``workers/engine/base.py``)."""

    engine_config: Any  # ``config.EPFSDP2EngineConfig``, which imports this room to register its engines
    _may_be_unused = r"(?!)"  # what a checkpoint may have and the model not, as a pattern (``load_weights``)
    _veomni_handles_position_ids = True  # verl then leaves positions whole, as ``SequenceParallel`` needs them
    _towers: VisionTowerSync | None = None
    _plan: StepEstimate | None = None

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        failure, line, own = None, "", engine_config
        try:
            # The driver checked this for main_ppo; sft_trainer has no driver.
            facts = check_training(
                engine_config,
                dist.get_world_size(),
                model_config,
                device=get_device_name(),
                setting="model",
                checkpoint=checkpoint_config,
                optim=None if engine_config.forward_only else optimizer_config,
            )
            # A path that is no local one has no facts.
            model = _on_meta(model_config) if facts is None else facts.model
            dense = is_dense(model, engine_config.expert_plan) if facts is None else facts.is_dense
            if dense:
                if facts is not None and not engine_config._of_a_role:
                    check_alone(engine_config, facts, "model")
                line = not_applied(engine_config, model_config.path, model)
                own = without_experts(engine_config, model)
        except Exception as error:
            failure = error
        check_agreement(
            {
                "engine": vars(engine_config),
                "optimizer": vars(optimizer_config) if optimizer_config is not None else {},
                "model config": without_paths(model_config.hf_config.to_dict()),
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            },
            device=get_device_name(),
            failure=failure,
        )
        if line and dist.get_rank() == 0:
            print(f"[epfsdp2] {line}", flush=True)
        engine_config = own
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        # float32 is what verl's forward takes as "no autocast". FSDP gathers parameters in their compute dtype, and
        # autocast would run in bfloat16 what a model computes in float32 on purpose, such as routers.
        self._autocast_dtype = torch.float32
        if engine_config.offload_policy:
            # FSDP moves parameters itself; verl must not.
            self._is_offload_param = self._is_offload_optimizer = False
        self._routers: RouterLosses | None = None
        self._lora: Lora | None = None
        self._saves = CheckpointSaver(get_device_name(), self._save_hf_config)
        if not engine_config.forward_only:
            server_adapter.install(engine_config.sync_timeout_seconds)
            separation_shim.install()
            distillation_shim.install()

    # -- building -----------------------------------------------------------------------------------------------

    def _init_device_mesh(self) -> None:
        topology = Topology.arrange(dist.get_world_size(), self.engine_config.ep_size, self.engine_config.fsdp_size)
        self.meshes = build_meshes(get_device_name(), topology)
        self.device_mesh = self.meshes.dense
        sp = self.engine_config.ulysses_sequence_parallel_size
        mesh = build_sequence_mesh(get_device_name(), topology.world, sp) if sp > 1 else None
        self.ulysses_device_mesh = mesh
        self.ulysses_parallel_group = None if mesh is None else mesh.get_group("sp")
        self.ulysses_sequence_parallel_size = sp
        self.use_ulysses_sp = sp > 1

    def initialize(self) -> None:
        self._build_model_optimizer()
        self.to("cpu", model=self._is_offload_param, optimizer=self._is_offload_optimizer, grad=self._is_offload_param)

    def _build_model_optimizer(self) -> None:
        """Build on meta, shard, allocate, load this rank's bytes; then optimizer and schedule."""
        revision = getattr(self.model_config.hf_config, "_commit_hash", None)  # as transformers notes it
        folder = local_checkpoint(self.model_config.local_path, revision, get_device_name())
        facts, failure = {}, None
        try:
            check_not_quantised(self.model_config.hf_config, folder)
            files, module = open_checkpoint(folder), self._build_module()
            facts = {"model": model_facts(module), "checkpoint": files.file_of}
        except Exception as error:
            failure = error
        check_agreement(facts, device=get_device_name(), failure=failure)
        # verl passes cumulative lengths where the model's forward takes them; the families here read position ids.
        self.pass_packed_cu_seqlens = False
        options = sharding_options(self.engine_config, self.model_config)
        fallback = choose_backend(options.experts_backend, get_device_name(), options.param_dtype).fallback
        if fallback and self.rank == 0 and find_experts(module, options.expert_plan):
            print(f"[epfsdp2] {fallback}")
        self._plan = self._plan_run(options)
        unused = shard_and_load(
            module,
            files,
            self.meshes,
            options,
            device=get_device_name(),
            device_id=get_device_id(),
            initialize=self._initialize,
            finish=None if self._lora is None else functools.partial(self._initialize_adapters, self._lora),
            progress=self.rank == 0,
            may_be_unused="" if self.engine_config.allow_unused_weights else self._may_be_unused,
        )
        if unused and self.rank == 0:
            print(f"[epfsdp2] {len(unused)} tensors of the checkpoint have no place in the model, e.g. {unused[:3]}")
        self.layer_names = layer_names(module)
        if hasattr(module.config, "vision_config"):
            self._towers = VisionTowerSync(module)
        config = self.engine_config
        self.rollout_sync = RolloutSync(
            module,
            self.meshes,
            self.layer_names,
            compute_dtypes(module, options),
            SyncSettings(config.rollout_sync, config.sync_megabytes << 20, config.rollout_sync_verify),
        )

        self.shard_export = ShardExport(module, self.meshes)

        if self._lora is not None:
            self._lora.freeze_base(module)

        self.module: Any = module
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        if not self.engine_config.forward_only:
            self.optimizer = self._build_optimizer(module)
            self.lr_scheduler = build_multi_lr_scheduler(self.optimizer, self._build_lr_scheduler)
            self.clipped_step = ClippedStep(self.optimizer_config.clip_grad, self.meshes)

    def _build_module(self) -> nn.Module:
        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype)
        module: Any = self._plain_module(self.model_config.hf_config, dtype)
        fused = self.model_config.fused_kernel_options
        with preserve_forward(module):
            apply_monkey_patch(
                model=module,
                use_remove_padding=self.use_remove_padding,
                ulysses_sp_size=1,  # verl's is for flash attention and a few families: SequenceParallel is ours
                use_fused_kernels=self.model_config.use_fused_kernels,
                fused_kernels_backend=fused.get("impl_backend") if fused is not None else None,
            )
        if self.ulysses_parallel_group is not None:
            SequenceParallel(module, self.ulysses_parallel_group)
        config = self.engine_config
        lora = LoraSettings.of(self.model_config, "model")
        if lora is not None:
            self._lora = Lora(module, lora, config.expert_plan)
        aux, z = config.router_aux_loss_coef, config.router_z_loss_coef
        if not config.forward_only and (aux or z or config.router_metrics):
            self._routers = RouterLosses(module, find_experts(module, config.expert_plan), aux, z)
        return module

    def _plain_module(self, config: Any, dtype: torch.dtype) -> nn.Module:
        """The model on the meta device, as its family has it."""
        return build_on_meta(self._auto_class(), config, dtype, self.model_config.trust_remote_code)

    def _module_to_plan(self, dtype: torch.dtype) -> nn.Module:
        """The same with its adapters, and a config of its own."""
        module = self._plain_module(copy.deepcopy(self.model_config.hf_config), dtype)
        lora = LoraSettings.of(self.model_config, "model")
        if lora is not None:
            Lora(module, lora, self.engine_config.expert_plan)
        return module

    def _plan_run(self, options: ShardingOptions) -> StepEstimate | None:
        """Print it; of a role that does not train, the mesh alone."""
        config, model, topology, plan = self.engine_config, self.model_config, self.meshes.topology, None
        if not config.forward_only:
            memory, device, build = get_torch_device(), get_device_name(), self._module_to_plan
            plan = estimate_step(config, model, self.optimizer_config, build, topology, options, memory, device)
        if self.rank == 0:
            mesh = f"mesh: {format_mesh(topology, config.ulysses_sequence_parallel_size)}"
            print("\n".join(f"[epfsdp2] {line}" for line in (plan.lines() if plan else [mesh])), flush=True)
        return plan

    def _auto_class(self) -> Any:
        return get_hf_auto_model_class(hf_config=self.model_config.hf_config)

    def _initialize(self, name: str, tensor: torch.Tensor, fits: bool) -> bool:
        """Fill what does not come from the checkpoint (``load_weights``). Adapters get their values after it."""
        return is_adapter(name)

    def _initialize_adapters(self, lora: Lora, module: nn.Module) -> None:
        folder = lora.settings.adapter
        with raise_on_all_ranks(get_device_name()):
            read = None if folder is None else read_adapter(folder, lora.targets, "model.lora_adapter_path")
            lora.initialize(module, self.engine_config.seed, read)

    def _build_optimizer(self, module: nn.Module):
        config = self.optimizer_config
        return optimizer_from_config(module, config, lambda params: build_optimizer(params, config))

    # -- running ------------------------------------------------------------------------------------------------

    def train_mode(self, **kwargs):
        return TrainMode(self, **kwargs)

    def eval_mode(self, **kwargs):
        return EvalMode(self, **kwargs)

    def train_batch(self, data, loss_function):
        if self._plan is not None:
            self._plan.begin_update()
        outputs = super().train_batch(data, loss_function)
        routers = self._routers.metrics() if self._routers is not None else {}
        planned = self._plan.metrics() if self._plan is not None else {}
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"] |= {name: [value] for name, value in {**routers, **planned}.items()}
            # A list, as verl joins the lists of ranks and mini-batches before it takes the mean.
            outputs["metrics"]["skipped_steps"] = [float(self.clipped_step.skipped)]
            if self.rollout_sync.last_report is not None:  # verl drops what the sync itself returns
                synced = self.rollout_sync.last_report.metrics()
                outputs["metrics"] |= {name: [value] for name, value in synced.items()}
        return outputs

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        if self._towers is not None:
            self._towers.sync_modalities(data.get("multi_modal_inputs", ()), get_device_id())
        if self._routers is not None and not forward_only:
            tokens = torch.tensor(data["input_ids"].values().numel(), device=get_device_id())
            dist.all_reduce(tokens, group=self.get_data_parallel_group())
            self._routers.begin(int(tokens))
        return super().forward_backward_batch(data, loss_function, forward_only)

    def forward_step(self, micro_batch, loss_function, forward_only):
        if self._routers is None or forward_only:
            return super().forward_step(micro_batch, loss_function, forward_only)
        self._routers.watch()
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        added = self._routers.loss(self._is_token)
        return loss if added is None else loss + added, output

    def prepare_model_inputs(self, micro_batch):
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        if self._plan is not None and torch.is_grad_enabled():
            self._plan.see(inputs["input_ids"].numel())
        if self._towers is not None:
            self._towers.prepare_inputs(inputs)
        if self._routers is not None:
            self._is_token = self._find_tokens(inputs, micro_batch)
        return inputs, arguments

    def _find_tokens(self, inputs: dict[str, Any], micro_batch: TensorDict) -> torch.Tensor:
        """bool ``[rows]``: what of the model's input is no padding."""
        if inputs.get("attention_mask") is not None:
            return inputs["attention_mask"].reshape(-1).bool()
        ids = inputs["input_ids"]
        rows = torch.arange(ids.numel() * self.ulysses_sequence_parallel_size, device=ids.device)
        return own_part(rows < micro_batch["input_ids"].values().shape[0], 0, self.ulysses_parallel_group)

    def lr_scheduler_step(self):
        rate = super().lr_scheduler_step()
        # The end of the run, as far as an engine is told: verl kills its workers.
        ended = self.lr_scheduler.last_epoch == self.optimizer_config.total_training_steps
        if ended and self._plan is not None and self.rank == 0 and (outcome := self._plan.outcome()):
            print(f"[epfsdp2] {outcome}", flush=True)
        return rate

    def optimizer_step(self) -> float:
        """Clip and step; a norm that is not finite skips the step, on all ranks alike.

        Returns:
            The gradient norm before clipping.
        """
        return self.clipped_step(self.optimizer).item()

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        BaseEngine.to(self, device=device, model=model, optimizer=optimizer, grad=grad)
        if self.engine_config.offload_policy:
            return
        if model:
            self.module.to(get_device_id() if device == get_device_name() else device)
        if optimizer and self.optimizer is not None:
            _move_optimizer(self.optimizer, get_device_id() if device == get_device_name() else device)
        if device == "cpu":
            # Copies to the host may be under way, and what they freed is wanted by another process on this device.
            get_torch_device().synchronize()
            get_torch_device().empty_cache()

    def disable_adapter(self) -> contextlib.AbstractContextManager[None]:
        """The model without its adapters: verl's reference policy where there are some."""
        return contextlib.nullcontext() if self._lora is None else self._lora.disabled()

    # -- weights out --------------------------------------------------------------------------------------------

    def get_per_tensor_param(self, layered_summon=False, base_sync_done=False, **kwargs):
        """The weights for the rollout: iterated, full tensors under names that vLLM's loader takes, on every rank.

        In the dtype that this engine's own forward computes with: masters are cast before they are gathered. Adapters
        are merged into what they adapt, so there is none for the rollout.
        """
        return self.rollout_sync.weights(), None

    def get_per_tensor_param_shard(self, **kwargs):
        """``(name, flat values, spec)`` of this rank's shards, for verl's ``delta_sharded`` backend; in bfloat16."""
        return self.shard_export.shards(), None

    def _hf_delta_entry(self, name, spec, place, lidx, lval):
        if isinstance(spec, ExpertsSpec):
            return experts_entry(spec, lidx, lval)
        return super()._hf_delta_entry(name, spec, place, lidx, lval)


def _on_meta(model: Any) -> nn.Module:
    """The model of verl's settings, with a config of its own."""
    auto_class = get_hf_auto_model_class(hf_config=model.hf_config)
    return build_on_meta(auto_class, copy.deepcopy(model.hf_config), torch.float32, model.trust_remote_code)


def _move_optimizer(optimizer: torch.optim.Optimizer, device: Any) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.to(device, non_blocking=True)
