"""The part of the engine that builds a model, before and after it is sharded and loaded."""

import copy
import re
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.device import get_device_id, get_device_name, get_torch_device
from verl.utils.model import get_hf_auto_model_class
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from ...rollout.bitwise.trainer import cut_experts, install_in_trainer
from ...rollout.sync import RolloutSync, SyncSettings
from ..build import shard_and_load
from ..checkpoint.safetensors_reader import CheckpointFiles, check_files, local_checkpoint, open_checkpoint
from ..config.automatic import AutomaticOverlap
from ..config.settings import mtp_loss_coef, param_dtype
from ..config.values import DTYPES, attention_of, get_setting
from ..fsdp.options import ShardingOptions
from ..fsdp.ulysses import SequenceParallel
from ..fsdp.wrap_plan import compute_dtypes
from ..lora.adapters import Lora
from ..lora.peft_files import adapter_config, read_adapter
from ..lora.settings import LoraSettings
from ..model.layers import layer_names
from ..model.meta import build_on_meta, check_not_quantised, copy_on_meta
from ..model.vision import VisionTowerSync, preserve_forward, tower_parameters
from ..model_files import CONFIG, folder_of, predicted_layers
from ..moe.find import find_experts, is_dense
from ..moe.gemm.backends import choose_backend
from ..moe.router.losses import RouterLosses
from ..mtp.layers import mtp_parameters, policy_experts
from ..optim.clip import ClippedStep
from ..optim.loss_scale import LossScale
from ..optim.lr_scheduler import MultiLRScheduler
from ..optim.multi_optimizer import optimizer_from_config
from ..packing.positions import embed_apart, positions_line
from ..packing.sequences import PackedSequences
from ..planner.flops import count_flops
from ..planner.run import StepEstimate, configured_batch, estimate_step, format_mesh
from ..preflight.model import check_alone, not_applied, without_experts
from ..preflight.run import check_training
from ..topology.dtensor import is_adapter
from ..topology.mesh import Meshes
from ..topology.rank_consistency import check_agreement, model_facts, raise_on_all_ranks, without_paths
from .delta_shards import ShardExport
from .rounded_weights import compute_as_rollout
from .step_features import PlannedMemory, RouterTerms, StepFeature, VisionTowers

__all__ = ["BuildsModel", "print_lines"]


def print_lines(rank: int, *lines: str | None) -> None:
    """Print the lines that are not empty, on rank 0."""
    if rank == 0:
        print("".join(f"[epfsdp2] {line}\n" for line in lines if line), end="", flush=True)


class BuildsModel(FSDPEngineWithLMHead):
    """The steps of ``_build_model_optimizer`` before and after the model is sharded."""

    meshes: Meshes
    scaler: LossScale | None  # verl's name
    run_plan: StepEstimate | None = None  # of a role that trains
    _lora: Lora | None = None
    adapters_config: dict[str, Any] | None = None  # peft's, if the rollout applies adapters; None: it gets them merged
    _may_be_unused = r"(?!)"  # pattern of tensors that only the checkpoint may have (``match_weights``)

    def _agree(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> Any:
        """Build the model on the meta device, and check its role's settings on all ranks; collective.

        Returns:
            ``engine_config``, for a dense model without the settings of experts.

        Raises:
            RankMismatchError: on all ranks, if their settings differ or one of them refuses its settings.
        """
        self.model_config, self.engine_config = model_config, engine_config
        module, failure, line, own = None, None, "", engine_config
        try:
            module = self._plain_module()
        except Exception as error:
            failure = error  # a check below may raise a better one
        try:
            # The driver of main_ppo has checked this; sft_trainer has no driver.
            facts = check_training(
                engine_config,
                dist.get_world_size(),
                model_config,
                device=get_device_name(),
                setting="model",
                checkpoint=checkpoint_config,
                optim=None if engine_config.forward_only else optimizer_config,
                built=None if module is None else copy.deepcopy(module).to("meta"),  # its buffers, too
            )
            if module is not None and is_dense(module, engine_config.expert_plan):
                # A path that is not local has no facts.
                if facts is not None and not engine_config._of_a_role:
                    check_alone(engine_config, facts, "model")
                line = not_applied(engine_config, model_config.path, module)
                own = without_experts(engine_config, module)
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
        assert module is not None, "all ranks raise if one could not build it"
        self._plain = module
        print_lines(dist.get_rank(), line)
        return own

    def _overlapped(self, options: ShardingOptions) -> ShardingOptions:
        """Return the options with the overlap of all-to-alls that sizes decide, if settings don't, on NVIDIA GPUs."""
        config, topology = self.engine_config, self.meshes.topology
        if get_device_name() != "cuda":
            return options
        batch = configured_batch(config, topology)
        tokens = batch.tokens if batch is not None else None
        if config.forward_only and config.use_dynamic_bsz:
            tokens = config.infer_max_token_len_per_gpu
        # Its arguments are equal on all ranks (``_agree``), so the number of chunks is.
        found = AutomaticOverlap.of(config, self._plain, options).on(options, topology, tokens)
        if found != options:
            values = f"{found.dispatch_chunks} engine.overlap_shared_experts={found.overlap_shared_experts}"
            print_lines(self.rank, f"all-to-alls overlap by engine.dispatch_chunks={values}")
        return found

    def _open(self) -> tuple[nn.Module, CheckpointFiles]:
        """Build the model on the meta device and open its checkpoint; all ranks raise if these differ."""
        config = self.model_config
        # transformers' note of the revision; the config may be another model's.
        revision = getattr(config.hf_config, "_commit_hash", None) if config.hf_config_path == config.path else None
        folder = local_checkpoint(config.local_path, revision, get_device_name())
        facts, failure = {}, None
        try:
            check_not_quantised(config.hf_config, folder)
            files = open_checkpoint(folder)
            check_files(files)
            module = self._build_module()
            facts = {"model": model_facts(module), "checkpoint": files.file_of}
        except Exception as error:
            failure = error
        check_agreement(facts, device=get_device_name(), failure=failure)
        if files.unread:
            print_lines(self.rank, f"not read from {folder}, as by transformers: {', '.join(files.unread)}")
        return module, files

    def _build_module(self) -> nn.Module:
        """Return the model on meta, with everything that must be installed before FSDP's hooks and recomputation."""
        module = self._plain
        if not self.engine_config.forward_only:
            self._plain = copy.deepcopy(module)  # for the plan
        self._patch(module)
        longest = self._longest()
        self.packed = PackedSequences(module, longest) if self.use_remove_padding else None
        if self.engine_config.rollout_bitwise:
            install_in_trainer(module, self.engine_config._rollout_tp)
        if self.packed is None:
            embed_apart(module, lambda: None, longest)
        if self.ulysses_parallel_group is not None:
            assert self.packed is not None, "check_sequence_parallel refuses rows that are not packed"
            whole = self.engine_config.batch_invariant
            SequenceParallel(module, self.ulysses_parallel_group, self.packed, whole)
        config, lora = self.engine_config, self._lora_settings()
        if lora is not None:
            self._lora = Lora(module, lora, config.expert_plan)
            if not self.model_config.lora.get("merge"):
                self.adapters_config = adapter_config(self._lora, self.model_config.local_path)
        self.router_features: list[StepFeature] = []
        aux, z = config.router_aux_loss_coef, config.router_z_loss_coef
        if not config.forward_only and (aux or z or config.router_metrics):
            losses = RouterLosses(module, policy_experts(module, config.expert_plan), aux, z)
            terms = RouterTerms(losses, self.get_data_parallel_group(), self.ulysses_parallel_group)
            self.router_features.append(terms)
        return module

    def _longest(self) -> int:
        """Return the length that decides all rotary frequencies: the rollout's, or 0 for each sequence's."""
        limit, config = self.engine_config._max_model_len, self.model_config.hf_config.get_text_config()
        return getattr(config, "max_position_embeddings", 0) if limit == 0 else limit or 0

    def _lora_settings(self) -> LoraSettings | None:
        """Return the settings of adapters; None if the weights are trained."""
        return LoraSettings.of(self.model_config, "model")

    def _plain_module(self) -> nn.Module:
        """Return the model of its family on the meta device."""
        config, dtype = self.model_config.hf_config, DTYPES[self.engine_config.model_dtype]
        # verl loads the config with this as an argument, and ``_attn_implementation`` of a config.json wins over it.
        config._attn_implementation = attention_of(self.model_config)
        return build_on_meta(self._auto_class(), config, dtype, self.model_config.trust_remote_code, self._add_modules)

    def _add_modules(self, module: nn.Module) -> None:
        """Add modules that the family's class leaves out, while the model is built."""

    def _auto_class(self) -> Any:
        return get_hf_auto_model_class(hf_config=self.model_config.hf_config)

    def _patch(self, module: nn.Module) -> None:
        """Apply verl's patches of transformers, as its own engines do."""
        fused = self.model_config.fused_kernel_options
        with preserve_forward(module):
            apply_monkey_patch(
                model=module,
                use_remove_padding=self.use_remove_padding,
                ulysses_sp_size=1,  # verl's needs flash attention and one of a few families; ours is SequenceParallel
                use_fused_kernels=self.model_config.use_fused_kernels,
                fused_kernels_backend=fused.get("impl_backend") if fused is not None else None,
            )

    def _announce(self, module: nn.Module, options: ShardingOptions) -> None:
        """Plan the run and print the plan; of a role that does not train, print its mesh."""
        wanted = options.experts_backend, get_device_name(), options.param_dtype, options.batch_invariant
        backend = choose_backend(*wanted).line
        lines = [
            backend if find_experts(module, options.expert_plan) else "",
            self.packed.line() if self.packed is not None else "",
            positions_line(module, self._longest()),
        ]
        config, topology = self.engine_config, self.meshes.topology
        if not config.forward_only:
            memory, device, build = get_torch_device(), get_device_name(), self._module_to_plan
            settings = config, self.model_config, self.optimizer_config, self.checkpoint_config
            self.run_plan = estimate_step(*settings, build, topology, options, memory, device)
            del self._plain
            if self.run_plan is not None:
                count_flops(self.model_config.hf_config, self.run_plan.sizes)
        mesh = f"mesh: {format_mesh(topology, self.ulysses_sequence_parallel_size)}"
        print_lines(self.rank, *lines, *([mesh] if self.run_plan is None else self.run_plan.lines()))

    def _module_to_plan(self, dtype: torch.dtype) -> nn.Module:
        """Return the plain model with adapters and its own config."""
        module = copy_on_meta(self._plain, dtype)
        lora = self._lora_settings()
        if lora is not None:
            Lora(module, lora, self.engine_config.expert_plan)
        return module

    def _shard_and_load(self, module: nn.Module, files: CheckpointFiles, options: ShardingOptions) -> None:
        unused = shard_and_load(
            module,
            files,
            self.meshes,
            options,
            device=get_device_name(),
            device_id=get_device_id(),
            initialize=self._initialize,
            finish=self._initialize_adapters,
            progress=self.rank == 0,
            may_be_unused=self._unused_names(),
        )
        if self.engine_config.rollout_bitwise:
            cut_experts(module, self.engine_config._rollout_tp)
        if unused:
            counts = Counter(re.sub(r"\d+", "*", key) for key in unused)
            named = ", ".join(f"{key} ({count})" if count > 1 else key for key, count in counts.items())
            print_lines(self.rank, f"{len(unused)} tensors of the checkpoint have no place in the model: {named}")

    def _unused_names(self) -> str:
        """Return a pattern of the tensors that only the checkpoint may have: also of layers after the model's."""
        if self.engine_config.allow_unused_weights:
            return ""
        config = self.model_config.hf_config.get_text_config()
        own = getattr(config, "num_hidden_layers", 0)
        further = range(own, own + predicted_layers(folder_of(self.model_config.local_hf_config_path) / CONFIG))
        layers = rf"\.layers\.({'|'.join(map(str, further))})\." if further else r"(?!)"
        return f"{self._may_be_unused}|{layers}"

    def _initialize(self, name: str, tensor: torch.Tensor, fits: bool) -> bool:
        """Fill a parameter that the checkpoint lacks (``match_weights``); adapters are filled after loading."""
        return is_adapter(name)

    def _initialize_adapters(self, module: nn.Module) -> None:
        lora = self._lora
        if lora is None:
            return
        folder = lora.settings.adapter
        with raise_on_all_ranks(get_device_name()):
            read = None if folder is None else read_adapter(folder, lora, "model.lora_adapter_path")
            lora.initialize(module, self.engine_config.seed, read)

    def _take_shards(self, module: nn.Module, options: ShardingOptions) -> None:
        """Prepare weight syncs, then freeze parameters that are not trained.

        The wrap plan decides the dtypes of a sync, and would read a frozen parameter as a correction bias.
        """
        config = self.engine_config
        self.layer_names = layer_names(module)
        if config.rollout_quantization_aware:
            compute_as_rollout(module, config.rollout_quantization_aware, config._rollout_channels, config._rollout)
        # Rounded as slices are, so that full tensors are no substitute.
        requested = "sliced" if config.rollout_quantization_aware else config.rollout_sync
        self.rollout_sync = RolloutSync(
            module,
            self.meshes,
            self.layer_names,
            compute_dtypes(module, options),
            SyncSettings(
                requested,
                config.sync_megabytes << 20,
                config.rollout_sync_verify,
                config._rollout,
                drafts=bool(get_setting(self.model_config, "mtp.enable_rollout")),
            ),
        )
        self.shard_export = ShardExport(module, self.meshes)
        if self._lora is not None:
            self._lora.freeze_base(module)
        for name in tower_parameters(module) if config.freeze_vision_tower else ():
            module.get_parameter(name).requires_grad_(False)
        if not mtp_loss_coef(config, self.model_config):
            for param in mtp_parameters(module):
                param.requires_grad_(False)

    def _features_of(self, module: Any) -> list[StepFeature]:
        how = self.engine_config.batch_invariant, self.model_config.use_fused_kernels
        vision = [VisionTowers(VisionTowerSync(module, *how))] if hasattr(module.config, "vision_config") else []
        planned = [] if self.run_plan is None else [PlannedMemory(self.run_plan)]
        return [*vision, *self.router_features, *planned]

    def _build_training(self, module: nn.Module) -> None:
        """Build the optimizer, its schedule and its step, for a role that trains."""
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        if self.engine_config.forward_only:
            return
        config = self.optimizer_config
        self.optimizer = optimizer_from_config(module, config, lambda params: build_optimizer(params, config))
        self.lr_scheduler = MultiLRScheduler(self.optimizer, self._build_lr_scheduler)
        if param_dtype(self.engine_config) is torch.float16:
            self.scaler = LossScale(module, self.layer_names)
        self.clipped_step = ClippedStep(config.clip_grad, self.meshes, self.scaler, mtp_parameters(module))
